"""Clearing: what it drops, what it leaves, and that nothing comes back; in one process and by a real well."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from disks import segments
from typer.testing import CliRunner
from wells import MIB, PATIENCE, InThread, Raw, Recorder, eventually, invoke, scheduler, worker
from wells import well as well

import golden
from lab.rig.members import FakeEngine, Model, Rig
from stepwell.cli.commands import app
from stepwell.client import control
from stepwell.client.socket import dial
from stepwell.client.start import rendezvous
from stepwell.errors import StepwellError
from stepwell.hierarchy.requests.clearing import Sum
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.work import TURN_BLOCKS
from stepwell.io.executor import Executor
from stepwell.io.files import SystemFiles
from stepwell.protocol import messages as m
from stepwell.protocol.admin import Cleared
from stepwell.testing.arena_kit import SLAB, SLOT
from stepwell.testing.clock import SetClock
from stepwell.tiers.base import Tier
from stepwell.tiers.disk.tier import DiskTier, Site

HOST, DISK, ALL = frozenset({"host"}), frozenset({"disk"}), frozenset({"host", "disk"})


def digests(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(32, "big") for n in numbers)


def rig_with_disk(folder: Path, seed: int = 1) -> Rig:
    def tiers(executor: Executor) -> tuple[Tier, ...]:
        sealing = Sealing(golden.KEYRING, sealed=True, wall=lambda: golden.NOW)
        sites = [Site(SystemFiles(folder), 128 * MIB, 0)]
        return (DiskTier(sites, executor, SetClock(), lambda: golden.NOW, sealing),)

    rig = Rig(4 * SLAB, seed=seed, keyring=golden.KEYRING, tiers=tiers)
    rig.hierarchy.recover()
    rig.settle()
    return rig


MODEL, OTHER_MODEL = Model(), Model(weights=b"v" * 32)


def engine_of(rig: Rig, model: Model = MODEL, name: str = "engine") -> FakeEngine:
    engine = FakeEngine(rig, model, name=name)
    rig.settle()
    return engine


def cleared(rig: Rig, tiers: frozenset[str], namespace: bytes = b"") -> dict[str, Sum]:
    answers: list[dict[str, Sum]] = []
    rig.hierarchy.operator.clear(tiers, namespace, answers.append)
    assert not answers
    rig.settle()
    (answer,) = answers
    return answer


def test_host_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    engine = engine_of(rig)
    assert engine.spill(digests(1, 2, 3)) == 3
    assert cleared(rig, HOST) == {"host": Sum(3, 3 * SLOT)}
    assert rig.hierarchy.arena.sums.blocks == 0
    assert engine.found(digests(1, 2, 3)) == 3, "they come up from disk"
    assert rig.hierarchy.stats()["dropped_cleared"] == 3


def test_disk_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    engine = engine_of(rig)
    engine.spill(digests(1, 2, 3))
    answer = cleared(rig, DISK)
    assert answer["disk"].blocks == 3
    assert answer["disk"].nbytes >= 3 * SLOT
    assert engine.found(digests(1, 2, 3)) == 3, "they are in host memory"
    assert not segments(tmp_path)


def test_a_tier_that_is_not_there_is_left_out() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = engine_of(rig)
    engine.spill(digests(1))
    assert cleared(rig, ALL) == {"host": Sum(1, SLOT)}


def test_what_is_pinned_or_copied_is_dropped_and_its_slots_come_free_later() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = engine_of(rig)
    engine.spill(digests(1, 2))
    engine.spill(digests(3, 4))
    pinned, leased = engine.ask(digests(1, 2)), engine.ask(digests(3, 4))
    rig.settle()
    transfer = engine.recall(leased)
    free = rig.hierarchy.stats()["free_slots"]
    assert cleared(rig, HOST)["host"].blocks == 4
    assert engine.found(digests(1, 2)) == engine.found(digests(3, 4)) == 0
    assert rig.hierarchy.stats()["free_slots"] == free, "nobody gets them yet"
    engine.recalled(transfer)
    engine.release(pinned)
    rig.settle()
    assert rig.hierarchy.stats()["free_slots"] == free + 4  # type: ignore[operator]
    assert engine.spill(digests(1)) == 1


def test_one_namespace_is_cleared() -> None:
    rig = Rig(4 * SLAB, seed=1)
    one, two = engine_of(rig), engine_of(rig, Model(weights=b"v" * 32), "other")
    one.spill(digests(1, 2))
    two.spill(digests(1, 2, 3))
    told: list[dict[bytes, Sum]] = []
    rig.hierarchy.operator.count_namespaces(lambda sums: told.append(dict(sums)))
    rig.settle()
    tags = {sums.blocks: tag for tag, sums in told[0].items()}
    assert sorted(tags) == [2, 3]
    assert told[0][tags[3]].nbytes == 3 * SLOT
    assert cleared(rig, HOST, tags[3]) == {"host": Sum(3, 3 * SLOT)}
    assert (one.found(digests(1, 2)), two.found(digests(1, 2, 3))) == (2, 0)
    assert cleared(rig, HOST, b"?" * 16) == {"host": Sum()}


def tag_of(engine: FakeEngine) -> bytes:
    assert engine.scheduler.member is not None
    keyed = engine.scheduler.member.session.keyed
    assert keyed is not None
    (origins,) = keyed.known
    return origins[0].tag


def test_one_namespace_is_cleared_from_host_and_disk(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    one, two = engine_of(rig), engine_of(rig, OTHER_MODEL, "other")
    one.spill(digests(1, 2))
    two.spill(digests(1, 2, 3))
    answer = cleared(rig, ALL, tag_of(two))
    assert answer["host"] == Sum(3, 3 * SLOT)
    assert (answer["disk"].blocks, answer["disk"].whole) == (3, True)
    assert answer["disk"].nbytes >= 3 * SLOT
    assert (one.found(digests(1, 2)), two.found(digests(1, 2, 3))) == (2, 0)
    cleared(rig, HOST)
    assert (one.found(digests(1, 2)), two.found(digests(1, 2, 3))) == (2, 0), "nothing of it is on disk"
    assert cleared(rig, DISK, tag_of(one))["disk"].blocks == 2
    assert one.found(digests(1, 2)) == 2, "they are in host memory"


def test_it_is_done_in_slices() -> None:
    rig = Rig(16 * SLAB, seed=1)
    engine = engine_of(rig)
    for first in range(0, 96, 8):
        assert engine.spill(digests(*range(first, first + 8))) == 8
    answers: list[dict[str, Sum]] = []
    rig.hierarchy.operator.clear(HOST, b"", answers.append)
    before = rig.hierarchy.arena.sums.blocks
    rig.hierarchy.turn()
    assert before - TURN_BLOCKS <= rig.hierarchy.arena.sums.blocks < before
    rig.settle()
    assert answers[0]["host"].blocks == 96


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_up_from_a_tier_that_is_being_swept_goes(tmp_path: Path, seed: int) -> None:
    """Until a sweep has come to its segment a block is found, and may be on its way up then."""
    rig = rig_with_disk(tmp_path, seed)
    one, two = engine_of(rig), engine_of(rig, OTHER_MODEL, "other")
    for n in range(0, 16, 4):
        one.spill(digests(*range(n, n + 4)))
        two.spill(digests(*range(n, n + 4)))
    cleared(rig, HOST)
    answers: list[dict[str, Sum]] = []
    rig.hierarchy.operator.clear(ALL, tag_of(one), answers.append)
    rig.turns()
    leases, _ = one.reserve(digests(100, 101))
    one.workers[0].say(m.Filled(leases, []))
    for _ in range(seed):
        rig.executor.step()
    tickets = [(each, each.ask(digests(n, n + 1))) for n in (0, 4, 8, 12) for each in (one, two)]
    rig.settle()
    for each, ticket in tickets:
        each.release(ticket)
    rig.settle()
    assert len(answers) == 1
    told: list[dict[bytes, Sum]] = []
    rig.hierarchy.operator.count_namespaces(lambda sums: told.append(dict(sums)))
    rig.settle()
    assert told[0][tag_of(one)].blocks == 2, "what it wrote meanwhile stays"
    assert [one.found(digests(n)) for n in range(16)] == [0] * 16
    assert [two.found(digests(n)) for n in range(16)] == [1] * 16
    assert "disk_errors_read" not in rig.hierarchy.stats()


@pytest.mark.parametrize("by_namespace", [False, True])
@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_nothing_of_before_comes_back(tmp_path: Path, seed: int, by_namespace: bool) -> None:
    """Blocks are waiting to be written, being written, and on their way up when everything is cleared."""
    rig = rig_with_disk(tmp_path, seed)
    engine, other = engine_of(rig), engine_of(rig, OTHER_MODEL, "other")
    other.spill(digests(1, 2))
    for n in range(0, 16, 4):
        engine.spill(digests(*range(n, n + 4)))
    tag = tag_of(engine) if by_namespace else b""
    cleared(rig, HOST)
    tickets = [engine.ask(digests(n, n + 1)) for n in (0, 4, 8)]
    rig.turns()
    leases, refs = engine.reserve(digests(*range(100, 104)))
    assert len(refs) == 4
    engine.workers[0].say(m.Filled(leases, []))
    for _ in range(seed):
        rig.executor.step()
    answers: list[dict[str, Sum]] = []
    rig.hierarchy.operator.clear(ALL, tag, answers.append)
    rig.settle()
    assert len(answers) == 1
    for ticket in tickets:
        engine.release(ticket)
    rig.settle()
    assert [engine.found(digests(n)) for n in (0, 1, 4, 5, 8, 9, 12, 100, 103)] == [0] * 9
    assert other.found(digests(1, 2)) == (2 if by_namespace else 0)
    assert engine.spill(digests(1, 2)) == 2
    assert engine.found(digests(1, 2)) == 2
    ended: list[bool] = []
    rig.hierarchy.drain(lambda: ended.append(True))
    rig.settle()
    assert ended == [True]
    rig.hierarchy.stack.levels[0].tier.close()
    again = rig_with_disk(tmp_path, seed)
    engine, other = engine_of(again), engine_of(again, OTHER_MODEL, "other")
    assert [engine.found(digests(n)) for n in (0, 4, 8, 12, 100, 1, 2)] == [0, 0, 0, 0, 0, 1, 1]
    assert other.found(digests(1, 2)) == (2 if by_namespace else 0)


# by the socket --------------------------------------------------------------------------------------------------------


def fill(socket: Path, *numbers: int) -> tuple[Recorder, Recorder]:
    """An engine spills these blocks and stays."""
    first, second = Recorder(), Recorder()
    engine = dial(socket)(scheduler(), first)
    copier = dial(socket)(worker(), second)
    second.next(m.Welcome)
    second.next(m.Ready)
    slab, fds = second.next(m.SlabShared)
    os.close(fds[0])
    first.next(m.Welcome)
    first.next(m.Ready)
    copier.post(m.Mapped(slab.slab))
    engine.post(m.Reserve(1, 0, b"", digests(*numbers)))
    granted, _ = first.next(m.Granted)
    assert all(granted.leases)
    copier.post(m.Filled(granted.leases, []))
    return first, second


def test_a_person_asks_a_well(well: InThread) -> None:
    fill(well.path, 1, 2)
    peer = Raw(well.path)
    peer.send(m.Hello(m.PROTOCOL, "admin"))
    peer.read()

    def rows() -> list[m.NamespaceRow]:
        peer.send(m.NamespacesQuery())
        answer = peer.read()
        assert isinstance(answer, m.Namespaces)
        return answer.rows

    eventually(lambda: sum(row.blocks for row in rows()) == 2)
    (row,) = rows()
    assert (row.tenant, row.nbytes, len(row.tag), len(row.engines)) == ("default", 2 * MIB, 16, 1)
    peer.send(m.Clear(["host"], b"?" * 16), m.Clear(["host", "disk"], row.tag), m.Clear(["host", "disk"]))
    assert [peer.read() for _ in range(3)] == [
        m.Cleared({"host": 0}, {"host": 0}),
        m.Cleared({"host": 2}, {"host": 2 * MIB}),
        m.Cleared({"host": 0}, {"host": 0}),
    ]
    peer.close()


@pytest.mark.parametrize("message", [m.Clear(["attic"]), m.Clear(["host"], b"short"), m.Clear([])])
def test_a_clear_that_makes_no_sense_ends_its_connection(well: InThread, message: m.Clear) -> None:
    peer = Raw(well.path)
    peer.send(m.Hello(m.PROTOCOL, "admin"), message)
    peer.read()
    refused = peer.read()
    assert isinstance(refused, m.Refused)
    assert refused.code == "SW-804"
    peer.close()


@pytest.mark.parametrize("message", [m.Clear(["host"]), m.NamespacesQuery()])
def test_engines_may_not_ask_it(well: InThread, message: m.Message) -> None:
    member = Recorder()
    link = dial(well.path)(scheduler(), member)
    member.next(m.Welcome)
    link.post(message)
    assert member.next(m.Refused)[0].code == "SW-804"


def test_who_has_left_needs_no_answer(well: InThread) -> None:
    for _ in range(5):
        peer = Raw(well.path)
        peer.send(m.Hello(m.PROTOCOL, "admin"), m.Clear(["host"]), m.NamespacesQuery())
        peer.close()
    fill(well.path, 1)


def test_a_clear_that_a_disk_holds_up_goes_on_and_its_receipt_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    well, goes_on = InThread(tmp_path, disk_bytes=64 * MIB), threading.Event()
    unlink = SystemFiles.unlink
    monkeypatch.setattr(SystemFiles, "unlink", lambda files, name: goes_on.wait(PATIENCE) and unlink(files, name))
    tier = well.tier
    assert tier is not None
    fill(well.path, 1, 2)
    eventually(lambda: tier.figures()["blocks"] == 2)
    with caplog.at_level(logging.INFO), pytest.raises(StepwellError) as caught:
        control.clear(tmp_path, ["disk"], seconds=0.3, socket=well.path)
    assert caught.value.code == "SW-503" and "not all cleared" in caught.value.what
    assert "cleared" not in caplog.text
    with caplog.at_level(logging.INFO):
        goes_on.set()
        eventually(lambda: "cleared: 2 blocks of disk" in caplog.text)
    well.close()


def test_a_clear_that_is_not_whole_says_why_and_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control, "tiers", lambda *_: ["host", "disk"])
    answer = Cleared({"host": 0, "disk": 3}, {"host": 0, "disk": 9}, ["disk"])
    monkeypatch.setattr(control, "clear", lambda *_, socket: answer)
    said = invoke("cache", "clear", "--home", str(tmp_path), "--namespace", "ab" * 16)[1]
    assert "blocks of a later release, which only a clear of the whole tier removes" in said
    assert "A namespace in quarantine stays in it" in said and "host tier: some" not in said


def test_the_commands_with_a_real_well(tmp_path: Path) -> None:
    home, disk = tmp_path / "home", tmp_path / "disk"
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--host", "64MiB", "--disk"]
    with subprocess.Popen([*command, f"{disk}:64MiB"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        try:
            members = fill(rendezvous(home).socket, 1, 2, 3)
            eventually(lambda: control.stats(home).get("disk_blocks") == 3)
            flat = json.loads(invoke("stats", "--home", str(home), "--json")[1])
            assert (flat["tiers"], flat["blocks"], flat["disk_blocks"]) == ("host,disk", 3, 3), "names that scripts use"
            code, said = invoke("cache", "namespaces", "--home", str(home), "--json")
            (row,) = json.loads(said)["namespaces"]
            assert (code, row["blocks"], row["tenant"]) == (0, 3, "default")
            code, said = invoke("cache", "clear", "--home", str(home), "--namespace", "ab" * 16)
            assert code == 0 and "disk tier: 0 blocks dropped, 0" in said, said
            code, said = invoke("cache", "clear", "--home", str(home), "--namespace", row["tag"], "--tier", "host")
            assert code == 0 and said == "host tier: 3 blocks dropped, 3MiB\n", said
            code, said = invoke("cache", "clear", "--home", str(home), "--namespace", row["tag"])
            assert code == 0 and "host tier: 0 blocks dropped" in said and "disk tier: 3 blocks dropped, 3" in said
            assert not segments(disk), "there was nothing else in them"
            code, said = invoke("cache", "clear", "--home", str(home), "--json")
            answer = json.loads(said)
            assert (code, answer["blocks"]) == (0, {"host": 0, "disk": 0})
            assert (answer["bytes"]["disk"], answer["partial"]) == (0, [])
            code, said = invoke("cache", "clear", "--home", str(home), "--tier", "dsk")
            assert code != 0 and "no tier called 'dsk'" in said and "host and disk" in said
            assert "host memory holds nothing" not in invoke("cache", "namespaces", "--home", str(home))[1], (
                "its engine lives"
            )
            del members
        finally:
            control.stop(home)


def test_the_commands_ask_a_well_at_a_socket_of_its_own(
    well: InThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = fill(well.path, 1, 2)

    def told(*arguments: str) -> Any:
        command = [*arguments, "--home", str(tmp_path / "home"), "--json"]
        return json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)

    def blocks(*arguments: str) -> int:
        return sum(row["blocks"] for row in told("cache", "namespaces", *arguments)["namespaces"])

    eventually(lambda: blocks("--socket", str(well.path)) == 2)
    monkeypatch.setenv("STEPWELL_SOCKET", str(well.path))
    assert blocks() == 2
    monkeypatch.setenv("STEPWELL_SOCKET", str(tmp_path / "nobody"))
    for command in ("clear", "namespaces"):
        with pytest.raises(StepwellError) as caught:
            told("cache", command)
        assert caught.value.code == "SW-505" and str(tmp_path / "nobody") in caught.value.what
    assert told("cache", "clear", "--tier", "host", "--socket", str(well.path))["blocks"] == {"host": 2}
    assert blocks("--socket", str(well.path)) == 0
    monkeypatch.delenv("STEPWELL_SOCKET")
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"socket: {well.path}\n")
    assert told("cache", "clear", "--config", str(settings))["blocks"] == {"host": 0}
    del members


def test_without_a_well_it_says_what_to_delete_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "my disk"
    disk.mkdir()
    (disk / f"{'0' * 16}.seg").write_bytes(b"x")
    monkeypatch.setenv("STEPWELL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STEPWELL_DISK", f"{disk}:1GiB")
    with pytest.raises(StepwellError) as caught:
        CliRunner().invoke(app, ["cache", "clear"], catch_exceptions=False)
    assert caught.value.code == "SW-505"
    assert f"rm '{disk}'/*.seg" in caught.value.fix
    assert (disk / f"{'0' * 16}.seg").exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("tag", ["", "zz" * 16, "ab" * 15, "ab " * 16])
def test_what_is_no_tag_is_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(StepwellError) as caught:
        CliRunner().invoke(app, ["cache", "clear", "--namespace", tag, "--home", str(tmp_path)], catch_exceptions=False)
    assert caught.value.code == "SW-102"
