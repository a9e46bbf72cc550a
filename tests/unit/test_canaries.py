"""When canaries are an alarm, and what a well does with a namespace in quarantine. Errors here are made up or measured;
where they come from is tests/engines/vllm/test_canary.py."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
import test_clear
from deep import HEALTHY, HUNG, chain, written
from test_clear import (
    ALL,
    HOST,
    OTHER_MODEL,
    PATIENCE,
    cleared,
    digests,
    engine_of,
    fill,
    invoke,
    rig_with_disk,
    tag_of,
)
from test_hierarchy import _keys
from wells import eventually

import golden
from lab.rig.members import FakeEngine, Model, Rig
from stepwell import events as e
from stepwell.block.layout import PAGE
from stepwell.client import control
from stepwell.client.socket import dial
from stepwell.client.start import rendezvous
from stepwell.config import Settings
from stepwell.hierarchy import audit
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.saved import StateStore, Tags
from stepwell.hierarchy.sessions.canaries import (
    ALARM_EVERY_S,
    FLOOR,
    KNOWN,
    MAX_ERRORS,
    MAX_NAMESPACES,
    PRIOR,
    Calibration,
    CanaryJudge,
)
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.work import TURN_BLOCKS
from stepwell.ops.checks import places
from stepwell.protocol import messages as m
from stepwell.protocol.link import Link
from stepwell.serve import process
from stepwell.serve.home.quarantine import LIST_NAME, MAX_LISTED, QuarantineList
from stepwell.serve.home.state_file import StateWriter
from stepwell.serve.log_messages import log_event
from stepwell.testing.arena_kit import SLAB
from stepwell.testing.clock import SetClock
from stepwell.vault.keyring import Keyring

BF16 = "bfloat16"
OFF = [9.0, 9.0]


@dataclass
class Named:
    """As much of an origin as counts here."""

    tag: bytes


class Saves(StateStore):
    def __init__(self) -> None:
        self.barred: list[list[Tags]] = []

    def save_barred(self, barred: Sequence[Tags]) -> None:
        self.barred.append(list(barred))


class Judge(CanaryJudge):
    """Of one tenant, whose alarms are never too soon."""

    def heard(self, *args: Any, tenant: str = "one") -> bool:  # type: ignore[override]
        cast(SetClock, self._clock).advance(ALARM_EVERY_S)
        return super().heard(tenant, *args)


def canaries() -> tuple[Judge, list[e.Event], list[list[tuple[bytes, ...]]]]:
    events: list[e.Event] = []
    store = Saves()
    return Judge(SetClock(), events.append, store=store), events, store.barred


def origins(*tags: bytes) -> Any:
    return [Named(tag) for tag in tags]


# the bound ------------------------------------------------------------------------------------------------------------


def test_the_second_mismatch_is_the_alarm() -> None:
    judge, events, kept = canaries()
    of = origins(b"new", b"old")
    assert not judge.heard(of, BF16, [0.01, 0.02])
    assert not judge.heard(of, BF16, [0.01, 0.26])
    assert not judge.bars(of)
    assert not judge.heard(of, BF16, [0.01, 0.02]), "clean ones between them change nothing"
    assert judge.heard(of, BF16, [0.01, float("nan")])
    assert judge.bars(of) and judge.bars(origins(b"old")) and not judge.bars(origins(b"other"))
    assert kept == [[(b"new", b"old")]]
    assert [type(event) for event in events] == [e.CanaryHeard] * 4 + [e.NamespaceQuarantined]
    assert not judge.heard(of, BF16, OFF), "it is in quarantine already"
    judge.lift(b"old", judge.barred)
    assert not judge.bars(of) and kept[-1] == []
    assert not judge.heard(of, BF16, OFF), "and begins anew"


def test_a_mismatch_long_ago_is_forgotten() -> None:
    for between, alarm in ((KNOWN - 1, True), (KNOWN, False)):
        judge, _, _ = canaries()
        of = origins(b"tag")
        judge.heard(of, BF16, OFF)
        for _ in range(between):
            judge.heard(of, BF16, [0.0, 0.0])
        assert judge.heard(of, BF16, OFF) == alarm


def test_the_bound_is_made_by_a_thousand_and_stays() -> None:
    known = Calibration([0.0, 0.0])
    for n in range(KNOWN):
        assert known.bounds(BF16) == [PRIOR[BF16]] * 2
        known.agreed([0.02 * n / (KNOWN - 1), 0.001])
    assert known.bounds(BF16) == [pytest.approx(0.08), FLOOR[BF16]]
    known.agreed([0.07, 0.04])
    assert known.bounds(BF16) == [pytest.approx(0.08), FLOOR[BF16]], "what is clean must not widen it"
    assert known.excess(BF16, [0.04, 0.06]) == pytest.approx(0.06 / FLOOR[BF16])


def test_a_bound_is_never_larger_than_any_rounding() -> None:
    known = Calibration([0.0, 0.0])
    for _ in range(KNOWN):
        known.agreed([0.2, 0.05])
    assert known.bounds(BF16) == [PRIOR[BF16], pytest.approx(0.2)]


def test_one_namespace_is_lifted_and_no_other() -> None:
    judge, events, kept = canaries()
    for tag in (b"a", b"b", b"c"):
        for _ in range(2):
            judge.heard(origins(tag), BF16, OFF)
    judge.lift(b"b", judge.barred)
    assert [judge.bars(origins(tag)) for tag in (b"a", b"b", b"c")] == [True, False, True]
    assert kept[-1] == [(b"a",), (b"c",)]
    judge.lift(b"", judge.barred)
    assert kept[-1] == []
    assert [event.tag for event in events if isinstance(event, e.QuarantineLifted)] == [b"b", b"a", b"c"]


def test_namespaces_are_judged_apart_and_are_few() -> None:
    judge, _, kept = canaries()
    for n in range(2 * MAX_NAMESPACES):
        assert not judge.heard(origins(b"%d" % n), BF16, OFF)
    assert len(judge._tenants["one"].known) == MAX_NAMESPACES
    for n in range(2 * MAX_NAMESPACES):
        judge.heard(origins(b"%d" % n), BF16, OFF)
        judge.heard(origins(b"%d" % n), BF16, OFF)
    assert len(judge.barred) == len(kept[-1]) == MAX_NAMESPACES
    assert not judge.bars(origins(b"0")) and judge.bars(origins(b"%d" % (2 * MAX_NAMESPACES - 1)))


def test_a_tenant_has_nothing_of_another_one_forgotten() -> None:
    judge, _, _ = canaries()
    for _ in range(2):
        judge.heard(origins(b"red"), BF16, OFF)
    judge.heard(origins(b"red too"), BF16, OFF)
    for n in range(2 * MAX_NAMESPACES):
        for _ in range(2):
            judge.heard(origins(b"%d" % n), BF16, OFF, tenant="blue")
    assert judge.bars(origins(b"red")), "its quarantine"
    assert judge.heard(origins(b"red too"), BF16, OFF), "its first mismatch"


def test_the_quarantine_of_an_earlier_well_is_nobodys_to_push_out() -> None:
    events: list[e.Event] = []
    judge = Judge(SetClock(), events.append, [(b"earlier",)])
    for n in range(2 * MAX_NAMESPACES):
        for _ in range(2):
            judge.heard(origins(b"%d" % n), BF16, OFF)
    assert judge.bars(origins(b"earlier")) and len(judge.barred) == 1 + MAX_NAMESPACES
    judge.lift(b"earlier", judge.barred)
    assert not judge.bars(origins(b"earlier")) and len(judge.barred) == MAX_NAMESPACES


def test_a_tenants_alarms_come_one_at_a_time() -> None:
    clock = SetClock()
    judge = CanaryJudge(clock, lambda event: None)

    def alarm(tenant: str, tag: bytes) -> bool:
        return [judge.heard(tenant, origins(tag), BF16, OFF) for _ in range(2)][1]

    assert alarm("one", b"a") and alarm("other", b"b")
    assert not alarm("one", b"c") and not alarm("one", b"c")
    clock.advance(ALARM_EVERY_S)
    assert judge.heard("one", origins(b"c"), BF16, OFF), "what was seen meanwhile counts"


def test_another_number_of_layers_compares_nothing() -> None:
    judge, events, _ = canaries()
    judge.heard(origins(b"tag"), BF16, [0.0, 0.0])
    assert not judge.heard(origins(b"tag"), BF16, [9.0])
    assert not judge.heard(origins(b"tag"), BF16, [9.0])
    assert len(events) == 1


# a well ---------------------------------------------------------------------------------------------------------------


def alarm(engine: FakeEngine, *, epoch: int = 0) -> None:
    for _ in range(2):
        engine.scheduler.say(m.Canary(epoch, BF16, OFF))
    engine.rig.settle()


def test_a_namespace_in_quarantine_is_empty_and_stays_so(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    one, two = engine_of(rig), engine_of(rig, OTHER_MODEL, "other")
    for each in (one, two):
        each.spill(digests(1, 2, 3))
    tag = tag_of(one)
    alarm(one)
    stats = rig.hierarchy.stats()
    assert (stats["quarantined_namespaces"], stats["canaries_mismatched"]) == (1, 2)
    assert (stats["blocks"], stats["disk_blocks"]) == (3, 3), "the other namespace's"
    ticket = one.ask(digests(1, 2))
    rig.settle()
    answer = one.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (0, False, "quarantined")
    one.release(ticket)
    assert one.spill(digests(4, 5)) == 0
    assert rig.hierarchy.stats()["spills_refused_quarantined"] == 2
    assert two.found(digests(1, 2, 3)) == 3
    assert one.found(digests(1), epoch=7) == 0
    assert one.spill(digests(1), epoch=7) == 1, "another weights epoch is another namespace"
    cleared(rig, HOST, tag)
    assert one.spill(digests(4)) == 0, "only a clear of all that there is lifts it"
    cleared(rig, ALL, tag)
    assert rig.hierarchy.stats()["quarantined_namespaces"] == 0
    assert one.spill(digests(4)) == 1
    assert one.found(digests(4)) == 1


def test_a_clear_that_is_not_whole_lifts_no_quarantine(tmp_path: Path) -> None:
    """What a later release wrote may be of the namespace."""
    head = golden.segment(closed=True)
    page = head[:8] + b"\3\0" + head[10 : PAGE - 4]
    (tmp_path / golden.SEGMENT_NAME).write_bytes(page + zlib.crc32(page).to_bytes(4, "little") + head[PAGE:])
    rig = rig_with_disk(tmp_path)
    engine = engine_of(rig)
    engine.spill(digests(1))
    alarm(engine)
    assert not cleared(rig, ALL, tag_of(engine))["disk"].whole
    assert rig.hierarchy.stats()["quarantined_namespaces"] == 1
    assert engine.spill(digests(2)) == 0
    assert cleared(rig, ALL)["disk"].whole
    assert rig.hierarchy.stats()["quarantined_namespaces"] == 0
    assert engine.spill(digests(2)) == 1


def test_a_clear_lifts_no_quarantine_that_began_after_it(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    engine = engine_of(rig)
    engine.spill(digests(1))
    answers: list[object] = []
    rig.hierarchy.operator.clear(ALL, tag_of(engine), answers.append)
    alarm(engine)
    assert answers and rig.hierarchy.stats()["quarantined_namespaces"] == 1


def test_what_is_under_way_when_the_alarm_comes_goes_nowhere(tmp_path: Path) -> None:
    rig = rig_with_disk(tmp_path)
    engine = engine_of(rig)
    engine.spill(digests(1, 2, 3))
    pinned = engine.ask(digests(1, 2, 3))
    rig.settle()
    filling, _ = engine.reserve(digests(4, 5))
    waiting = engine.ask(digests(4, 5))
    rig.settle()
    assert engine.answer(waiting).more
    alarm(engine)
    assert (engine.answer(waiting).more, engine.answer(waiting).reason) == (False, "quarantined")
    for worker in engine.workers:
        worker.say(m.Filled(filling, []))
    transfer = engine.recall(pinned)
    rig.settle()
    engine.recalled(transfer)
    engine.release(waiting)
    rig.settle()
    stats = rig.hierarchy.stats()
    assert [stats[name] for name in ("blocks", "disk_blocks", "filling", "leased_blocks", "pinned_bytes")] == [0] * 5
    audit.hierarchy(rig.hierarchy)


def test_what_comes_up_from_disk_when_the_alarm_comes_goes_too(tmp_path: Path) -> None:
    for seed in range(6):
        (folder := tmp_path / str(seed)).mkdir()
        rig = rig_with_disk(folder, seed)
        engine = engine_of(rig)
        engine.spill(digests(1, 2, 3, 4))
        rig.hierarchy.operator.clear(HOST, b"", lambda sums: None)
        rig.settle()
        ticket = engine.ask(digests(1, 2, 3, 4))
        for _ in range(seed):
            rig.turns()
            rig.executor.step()
        alarm(engine)
        engine.release(ticket)
        rig.settle()
        assert (rig.hierarchy.stats()["blocks"], rig.hierarchy.stats()["disk_blocks"]) == (0, 0)


def test_what_lands_after_the_alarm_is_told_to_nobody() -> None:
    """A request that waits for blocks from below is answered with what it was told before."""
    rig = written(4, 6)
    engine = rig.join()
    first, both = chain(1), chain(6)
    ticket = engine.ask(first)
    rig.settle()
    engine.release(ticket)  # the first block is in host memory now
    rig.faulty.faults = HUNG
    ticket = engine.ask(both)
    rig.turns()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (1, True)
    alarm(engine)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (1, False, "quarantined")
    engine.release(ticket)
    rig.settle()
    assert [rig.stat(name) for name in ("blocks", "filling", "pinned_bytes", "staging_blocks")] == [0] * 4


def test_an_alarm_in_the_middle_of_a_long_answer_ends_it() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = engine_of(rig, Model(shard_bytes=4096))
    many = chain(2 * TURN_BLOCKS)
    leases, _ = engine.reserve(many)
    engine.workers[0].say(m.Filled(leases, []))
    rig.settle()
    assert rig.hierarchy.arena.sums.blocks == 2 * TURN_BLOCKS
    ticket = engine.ask(many)
    rig.hierarchy.turn()
    assert engine.answer(ticket).more is None, "it goes on in the next turn"
    alarm(engine)
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.reason) == (0, "quarantined")
    engine.release(ticket)
    rig.settle()


def test_a_quarantine_holds_over_keys_and_wells(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(4 * SLAB, seed=1, keyring=_keys(b"a" * 32))
    engine = engine_of(rig)
    engine.spill(digests(1))
    alarm(engine)
    barred = rig.hierarchy.canaries.barred
    again = Rig(4 * SLAB, seed=1, keyring=_keys(b"b" * 32, b"a" * 32), barred=barred)
    assert engine_of(again).spill(digests(1)) == 0, "by its tag of the older key"
    assert again.hierarchy.stats()["quarantined_namespaces"] == 1
    rotated = Sealing(_keys(b"c" * 32), sealed=True, wall=lambda: 0.0)
    monkeypatch.setattr(again.hierarchy.registry, "_sealing", rotated)
    assert engine_of(again, name="new").spill(digests(1)) == 1, "with new keys nothing of before can be read"


def test_a_comparison_is_leased_and_is_no_recall() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = engine_of(rig)
    engine.spill(digests(1, 2, 3))
    ticket = engine.ask(digests(1, 2, 3))
    rig.settle()
    engine.scheduler.say(m.Recall(ticket, 77, 1, 2, True))
    rig.settle()
    stats = rig.hierarchy.stats()
    assert (stats["leased_blocks"], stats["pinned_bytes"], stats["recalled_blocks"]) == (2, 0, 0)
    engine.recalled(77)
    assert rig.hierarchy.stats()["leased_blocks"] == 0


@pytest.mark.parametrize("errors", [[], [0.0] * (MAX_ERRORS + 1)], ids=["none", "too many"])
def test_a_canary_that_makes_no_sense_ends_the_session(errors: list[float]) -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = engine_of(rig)
    engine.scheduler.say(m.Canary(0, BF16, errors))
    assert engine.scheduler.take(m.Refused)[0].code == "SW-804"
    assert not engine.live


def test_an_engine_of_the_protocol_before_is_served() -> None:
    """It knows no canaries, and its Recall has a field less."""

    class Old(FakeEngine):
        def scheduler_hello(self, protocol: int = m.PROTOCOL - 1) -> m.Hello:
            return super().scheduler_hello(protocol)

        def worker_hello(self, *said: Any) -> m.Hello:
            return msgspec.structs.replace(super().worker_hello(*said), protocol=m.PROTOCOL - 1)

    rig = Rig(4 * SLAB, seed=1)
    engine = Old(rig)
    rig.settle()
    assert engine.live and engine.spill(digests(1, 2)) == 2
    ticket = engine.ask(digests(1, 2))
    rig.settle()
    recall = msgspec.msgpack.decode(msgspec.msgpack.encode(["Recall", ticket, 5, 0, 2]), type=m.Recall)
    engine.scheduler.say(recall)
    assert rig.hierarchy.stats()["recalled_blocks"] == 2
    engine.recalled(5)


# what a person sees ---------------------------------------------------------------------------------------------------


def test_the_alarm_is_a_line_with_a_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(e.CanaryHeard(0.5))
        assert not caplog.records
        log_event(e.CanaryHeard(7.0))
        log_event(e.NamespaceQuarantined(b"\xab" * 16, 7.0))
        log_event(e.QuarantineLifted(b"\xab" * 16))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "INFO"]
    assert f"stepwell cache clear --namespace {'ab' * 16}" in caplog.text and "SW-406" in caplog.text


def filled(socket: Path, *numbers: int) -> Link:
    """The scheduler of an engine that has spilled these blocks. Its worker lives as long as the process."""
    links: list[Link] = []

    def dialled(path: Path) -> Callable[..., Link]:
        def join(*said: Any) -> Link:
            links.append(dial(path)(*said))
            return links[-1]

        return join

    with patch.object(test_clear, "dial", dialled):
        fill(socket, *numbers)
    return links[0]


def test_a_real_well_remembers_its_quarantine(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--host", "64MiB", "--disk"]
    tag = ""
    for life in range(2):
        with subprocess.Popen([*command, f"{tmp_path}/d:64MiB"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and "serving" in process.stdout.readline()
            try:
                if life == 0:
                    engine = filled(rendezvous(home).socket, 1, 2, 3)
                    eventually(lambda: control.stats(home).get("disk_blocks") == 3)
                    for _ in range(2):
                        engine.post(m.Canary(0, BF16, OFF))
                    eventually(lambda: (home / LIST_NAME).exists() and json.loads((home / LIST_NAME).read_bytes()))
                    eventually(lambda: control.stats(home)["blocks"] == 0)
                    (row,) = json.loads(invoke("cache", "namespaces", "--home", str(home), "--json")[1])["namespaces"]
                    assert (row["quarantined"], row["blocks"]) == (True, 0)
                    tag = row["tag"]
                    assert [tag] in json.loads((home / LIST_NAME).read_bytes())
                    process.kill()
                    continue
                assert "ALARM: 1 namespace(s) in quarantine" in invoke("stats", "--home", str(home))[1]
                (check,), _ = places.well(home)
                assert check.status == "warn" and "SW-406" in check.text
                code, said = invoke("cache", "namespaces", "--home", str(home))
                assert code == 0 and tag in said and "in quarantine" in said
                assert invoke("cache", "clear", "--home", str(home), "--namespace", tag)[0] == 0
                assert "ALARM" not in invoke("stats", "--home", str(home))[1]
                eventually(lambda: json.loads((home / LIST_NAME).read_bytes()) == [])
            finally:
                if life:
                    control.stop(home)
        process.wait(PATIENCE)
    assert "SW-406" in (home / "stepwell.log").read_text()


def test_a_well_begins_with_the_quarantine_of_the_one_before_and_hands_its_own_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its loop, in whose place the alarm is raised."""
    before = [(b"a" * 16, b"b" * 16)]
    begun: list[list[tuple[bytes, ...]]] = []
    QuarantineList(tmp_path).write([[tag.hex() for tag in tags] for tags in before])

    def loop(hierarchy: Hierarchy, *_: Any, **__: Any) -> Any:
        def run() -> str:
            begun.append(list(hierarchy.canaries.barred))
            for _ in range(2):
                hierarchy.canaries.heard("default", origins(b"c" * 16), BF16, OFF)
            return "the test has seen enough"

        return SimpleNamespace(run=run, drain=lambda seconds: True)

    monkeypatch.setattr(process, "Loop", loop)
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    process._serve(tmp_path, Settings(), 64 << 20, Keyring.ephemeral(), [], [], False, lambda: None, Settings)
    assert begun == [before]
    assert QuarantineList(tmp_path).read() == [*before, (b"c" * 16,)]


# the list in home -----------------------------------------------------------------------------------------------------


def test_the_list_of_now_is_what_the_next_well_reads(tmp_path: Path) -> None:
    kept, keeper = QuarantineList(tmp_path), StateWriter()
    assert kept.read() == []
    for barred in ([(b"a" * 16,)], [(b"a" * 16,), (b"b" * 16, b"c" * 16)], []):
        kept.keep(barred, keeper)
        assert keeper.settle(PATIENCE)
        assert QuarantineList(tmp_path).read() == barred
        assert (tmp_path / LIST_NAME).stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / f"{LIST_NAME}.new").exists()
    assert keeper.close(PATIENCE)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[["zz"]]', b"null", b"[" * 100_000, b"\xff\xfe"])
def test_a_list_that_cannot_be_read_costs_no_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LIST_NAME).write_bytes(content)
    assert QuarantineList(tmp_path).read() == []


def test_a_list_is_read_as_far_as_there_may_be_namespaces(tmp_path: Path) -> None:
    many = [[f"{n:032x}"] for n in range(MAX_LISTED + 3)]
    (tmp_path / LIST_NAME).write_text(json.dumps(many))
    assert QuarantineList(tmp_path).read() == [(bytes.fromhex(tag),) for (tag,) in many[3:]]
    (tmp_path / LIST_NAME).write_text(json.dumps([["ab" * 16] * 40_000]))
    assert QuarantineList(tmp_path).read() == [], "it is too long to be one of ours"


def test_a_list_that_cannot_be_written_costs_no_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = StateWriter()
    QuarantineList(tmp_path / "gone").keep([(b"a" * 16,)], keeper)
    assert keeper.close(PATIENCE)
    assert "will not outlive this well" in caplog.text


# noise ----------------------------------------------------------------------------------------------------------------


def test_rounding_is_never_an_alarm_and_other_weights_always_are() -> None:
    """20,000 canaries of an engine's rounding, which differs in size from layer to layer and from run to run."""
    dice = random.Random(1)
    judge, _, _ = canaries()
    of = origins(b"tag")
    scale = [dice.uniform(0.002, 0.02) for _ in range(60)]
    for _ in range(20_000):
        busy = dice.choice((0.0, 1.0, 1.0, 1.5))
        assert not judge.heard(of, BF16, [s * busy * (1 + abs(dice.gauss(0, 0.15))) for s in scale])
    assert judge._tenants["one"].known[b"tag"].suspect is None
    changed = [s + 0.1 for s in scale]
    assert [judge.heard(of, BF16, changed) for _ in range(2)] == [False, True]
