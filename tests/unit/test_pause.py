"""The off switch: what a pause stops and what it leaves, that it lasts, who may throw it and where it is seen."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deep import DeepRig, chain, fill, told
from hypothesis import given
from hypothesis import strategies as st
from test_client import D, PlayedWell, found, released
from test_client import scheduler as client_of
from test_prefetch import GAP_S, WHOLE, forgotten, pass_time, talk, there
from test_prefetch import made as guessing
from test_writer import below, drain
from wells import PATIENCE, InThread, Raw, home_apart, invoke, scheduler

from lab.rig.members import FakeEngine
from stepwell.client import control
from stepwell.client.holder import HOLDER_NAME
from stepwell.client.start import lock, rendezvous
from stepwell.config import Settings
from stepwell.engines.common import log_messages
from stepwell.engines.common.counts import Tally
from stepwell.errors import AccessDenied, BackendDown
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.pauses import MAX_REASON, PAUSED, Pauses, one_line
from stepwell.hierarchy.requests.planner import RecallPlanner
from stepwell.hierarchy.saved import KINDS, Kind, PauseRecord, StateStore
from stepwell.io.paths import prepare_home
from stepwell.log import RateLimited
from stepwell.ops import switch
from stepwell.ops.checks import places
from stepwell.policies.writing.back import Back
from stepwell.policies.writing.second_touch import SecondTouchWriting
from stepwell.protocol import messages as m
from stepwell.protocol import wire
from stepwell.serve import log_messages as well_log_messages
from stepwell.serve import process
from stepwell.serve.home import state_file
from stepwell.serve.home.pauses import PAUSED_NAME, PauseList
from stepwell.serve.home.state_file import StateWriter
from stepwell.serve.log_messages import log_event
from stepwell.serve.server.admin import Shell
from stepwell.testing.arena_kit import SLOTS
from stepwell.tiers.faulty import TierFaults
from stepwell.vault.keyring import Keyring

HUNG = TierFaults(hang=1.0)


def pause(rig: DeepRig, *kinds: Kind) -> None:
    for kind in kinds or KINDS:
        rig.hierarchy.operator.pause(PauseRecord(kind, 1.8e9, 1000, "a test"))


def resume(rig: DeepRig, *kinds: Kind) -> None:
    for kind in kinds or KINDS:
        rig.hierarchy.operator.resume(kind, 1000)


def asked(engine: FakeEngine, of: bytes) -> tuple[int, bool | None, str]:
    """Blocks found, whether more may come, and why the run ends: as the well says before time passes or a job runs."""
    ticket = engine.ask(of)
    engine.rig.turns()
    answer = engine.answer(ticket)
    return len(answer.refs), answer.more, answer.reason


# recalls --------------------------------------------------------------------------------------------------------------


def test_while_recalls_are_paused_every_ask_is_a_miss_at_once_and_then_they_hit_again() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    rig.settle()
    pause(rig, "recalls")
    assert asked(engine, digests) == (0, False, PAUSED)
    assert rig.stat("misses_paused") == 6
    assert rig.stat("paused_recalls") == 1 and rig.stat("paused_spills") == 0
    assert engine.spill(chain(2, 100)) == 2, "spills go on"
    resume(rig)
    ticket = engine.ask(digests)
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == list(range(100, 106))
    assert rig.stat("paused_recalls") == 0


def test_a_request_that_waits_for_a_tier_is_answered_when_recalls_are_paused() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    rig.settle()
    second = rig.next_life(3)
    engine = second.join()
    second.faulty.faults = HUNG
    ticket = engine.ask(digests)
    second.settle()
    assert engine.answer(ticket).more, "it waits for what hangs"
    pause(second, "recalls")
    second.turns()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (0, False)
    assert engine.answer(ticket).reason == PAUSED
    reads = len(second.asked)
    assert asked(engine, digests) == (0, False, PAUSED)
    assert len(second.asked) == reads, "nothing is read"


def test_while_recalls_are_paused_a_tier_that_was_refused_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the pause comes while a request is being weighed."""
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    rig.settle()
    second = rig.next_life(3)
    engine = second.join()

    def refused(self: RecallPlanner, session: Any, ticket: Any, stretches: Any) -> None:
        ticket.most, ticket.short = 0, "recompute_cheaper"
        pause(second, "recalls")

    monkeypatch.setattr(RecallPlanner, "_weigh", refused)
    ticket = engine.ask(digests)
    second.settle()
    assert engine.answer(ticket).reason == PAUSED
    assert not second.asked


def test_a_request_that_waits_for_room_or_for_what_its_engine_fills_is_answered_too() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(2)
    leases, _ = engine.reserve(digests)
    assert all(leases)
    ticket = engine.ask(digests)
    rig.settle()
    assert engine.answer(ticket).more and engine.answer(ticket).reason == "filling"
    pause(rig, "recalls")
    rig.turns()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (False, PAUSED)


def test_what_was_found_and_is_not_offered_yet_is_taken_back_and_what_is_under_way_completes() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    rig.settle()
    waiting, copying = engine.ask(digests), engine.ask(digests)
    rig.settle()
    transfer = engine.recall(copying)
    refs = engine.answer(copying).refs
    pause(rig, "recalls")
    rig.turns()
    assert engine.scheduler.take(m.GiveWay) == [m.GiveWay(waiting, PAUSED)]
    engine.release(waiting)
    assert told(engine, refs) == list(range(100, 106))
    engine.recalled(transfer)
    rig.settle()
    assert rig.stat("recalled_blocks") == 6
    assert rig.stat("leased_blocks") == rig.stat("pinned_bytes") == 0
    assert rig.stat("blocks") == 6, "they stay where they are"


def test_a_request_that_its_client_has_offered_already_keeps_what_it_was_offered() -> None:
    well = PlayedWell()
    client = client_of(well)
    offered, unpolled = client.ask(D + D, 0, 1), client.ask(D + D, 0, 2)
    assert offered is not None and unpolled is not None
    for ask in (offered, unpolled):
        well.receivers[0].received(found(ask, 2, more=False, reason="end"), ())
    assert client.offer(offered) == 2
    for ask in (offered, unpolled):
        well.receivers[0].received(m.GiveWay(ask.ticket, PAUSED), ())
    assert (offered.blocks, offered.reason) == (2, "end")
    assert (unpolled.blocks, unpolled.final, unpolled.reason) == (0, True, PAUSED)
    assert released(well) == 1


def test_pausing_takes_turns_with_engines_however_many_requests_there_are() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(1)
    fill(engine, digests)
    rig.settle()
    for _ in range(100):
        engine.ask(digests)
    rig.turns()
    pause(rig, "recalls")
    rig.hierarchy.turn()
    assert 0 < len(engine.scheduler.take(m.GiveWay)) < 100
    rig.turns()
    resume(rig)


def test_a_pause_that_ends_takes_nothing_back_any_more() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(1)
    fill(engine, digests)
    rig.settle()
    ticket = engine.ask(digests)
    rig.turns()
    pause(rig, "recalls")
    resume(rig, "recalls")
    rig.turns()
    assert not engine.scheduler.take(m.GiveWay)
    assert len(engine.answer(ticket).refs) == 1


def test_nothing_is_guessed_while_recalls_are_paused() -> None:
    rig = guessing()
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    pause(rig, "recalls")
    pass_time(rig, GAP_S)
    assert there(rig, engine, digests) == 0 and not rig.stat("dict_prefetched_blocks")
    resume(rig)
    assert engine.found(digests) == WHOLE


# spills ---------------------------------------------------------------------------------------------------------------


def test_while_spills_are_paused_all_are_refused_and_then_they_are_taken_again() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    rig.settle()
    pause(rig, "spills")
    leases, refs = engine.reserve(chain(3, 100))
    assert leases == [0, 0, 0] and not len(refs)
    assert rig.stat("spills_refused_paused") == 3
    assert engine.found(digests) == 4, "recalls go on"
    resume(rig)
    assert engine.spill(chain(3, 100)) == 3


def test_a_spill_that_waits_for_a_slab_is_refused_when_spills_are_paused() -> None:
    rig = DeepRig(3)
    engine = FakeEngine(rig)
    engine.scheduler.say(m.Reserve(engine.number(), 0, b"", chain(2)))
    rig.turns()
    assert not engine.scheduler.take(m.Granted), "its slab is being made"
    pause(rig, "spills")
    rig.turns()
    (granted,) = engine.scheduler.take(m.Granted)
    assert granted.leases == [0, 0]


def test_what_was_taken_before_the_pause_is_published_and_written() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(3)
    leases, _ = engine.reserve(digests)
    pause(rig, "spills")
    engine.workers[0].say(m.Filled(leases, []))
    rig.settle()
    assert below(rig, engine, digests) == [0, 1, 2]
    assert engine.found(digests) == 3


def test_a_use_writes_nothing_while_spills_are_paused() -> None:
    rig = DeepRig(3, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    rig.settle()
    pause(rig, "spills")
    assert engine.found(digests) == 3
    assert not below(rig, engine, digests)
    resume(rig)
    assert engine.found(digests) == 3
    assert below(rig, engine, digests) == [0, 1, 2]


@pytest.mark.parametrize("paused", [False, True])
def test_nothing_is_written_ahead_or_at_the_end_while_spills_are_paused(paused: bool) -> None:
    rig = DeepRig(3, write=Back())
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    rig.settle()
    if paused:
        pause(rig, "spills")
    assert drain(rig)
    assert len(rig.below.blocks) == (0 if paused else 3)


def test_what_was_to_be_written_ahead_is_when_spills_are_resumed() -> None:
    rig = DeepRig(2, write=Back())
    engine, leases = rig.join(), []
    for n in range(2 * SLOTS):  # all that host memory holds
        engine.scheduler.say(m.Reserve(engine.number(), 0, b"", chain(1, n)))
        rig.settle()
        leases += engine.scheduler.take(m.Granted)[0].leases
    pause(rig, "spills")
    engine.workers[0].say(m.Filled(list(filter(None, leases)), []))
    rig.settle()
    assert not rig.below.blocks
    resume(rig)
    rig.settle()
    assert rig.below.blocks


def test_clearing_works_while_all_is_paused() -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    rig.settle()
    pause(rig)
    gone: list[Any] = []
    rig.hierarchy.operator.clear(rig.hierarchy.operator.tiers, b"", gone.append)
    rig.settle()
    assert gone[0]["host"].blocks == 3 and not rig.below.blocks
    resume(rig)
    assert engine.found(digests) == 0


def test_an_engine_that_joins_while_spills_are_paused_is_told() -> None:
    rig = DeepRig(3)
    pause(rig, "spills")
    engine = rig.join()
    (welcome,) = engine.scheduler.take(m.Welcome)
    assert "spills are paused" in welcome.warnings[0]
    assert not engine.workers[0].take(m.Welcome)[0].warnings


# the switch -----------------------------------------------------------------------------------------------------------


class Saves(StateStore):
    def __init__(self, save_paused: Callable[[Sequence[PauseRecord]], None]) -> None:
        self.save_paused = save_paused


def test_pausing_twice_changes_nothing_and_is_kept_again() -> None:
    events: list[Any] = []
    kept: list[Sequence[PauseRecord]] = []
    pauses = Pauses(events.append, [], Saves(kept.append))
    first, second = PauseRecord("recalls", 1.0, 7, "first"), PauseRecord("recalls", 2.0, 8, "second")
    assert pauses.pause(first) and not pauses.pause(second)
    assert pauses.all == [first] and kept == [[first], [first]]
    assert pauses.resume("recalls", 8) and not pauses.resume("recalls", 8)
    assert not pauses.all and kept[2:] == [[], []]
    assert [event.paused for event in events] == [True, False]


def test_a_reason_is_one_short_line() -> None:
    assert one_line(" wrong\nanswers\x1b ") == "wrong?answers?"
    assert len(one_line("x" * 1000)) == MAX_REASON


def test_a_pause_says_what_since_when_by_whom_and_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(well_log_messages, "_switched", RateLimited(well_log_messages.log))
    assert str(PauseRecord("recalls", 1.8e9, 7, "a test")) == "recalls since 2027-01-15 08:00:00 UTC by user 7: a test"
    assert str(PauseRecord("spills", 1e300, 7)) == "spills since 9999-12-31 23:59:59 UTC by user 7"
    with caplog.at_level(logging.INFO):
        pauses = Pauses(log_event, [], StateStore())
        pauses.pause(PauseRecord("recalls", 1.8e9, 7, "a test"))
        pauses.resume("recalls", 8)
    assert [record.getMessage() for record in caplog.records] == [
        "recalls are paused by user 7: a test; `stepwell resume recalls` undoes it",
        "recalls are resumed by user 8",
    ]


def test_a_script_that_pauses_and_resumes_without_end_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(well_log_messages, "_switched", RateLimited(well_log_messages.log, clock=lambda: 0.0))
    monkeypatch.setattr(state_file, "_limited", RateLimited(state_file.log, clock=lambda: 0.0))
    keeper, listed = StateWriter(), PauseList(tmp_path / "gone")
    with caplog.at_level(logging.INFO):
        pauses = Pauses(log_event, [], Saves(lambda paused: listed.keep(paused, keeper)))
        for number in range(20):
            pauses.pause(PauseRecord("recalls", 1.8e9, 7, f"reason {number}"))
            assert keeper.settle(PATIENCE)
            pauses.resume("recalls", 8)
        assert keeper.close(PATIENCE)
    said = sorted(record.getMessage().partition(" by ")[0][:19] for record in caplog.records)
    assert said == ["recalls are paused", "recalls are resumed", "what is paused now "]


def test_an_engine_says_once_that_recalls_are_paused_and_once_that_they_are_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_messages.log, "propagate", True)
    tally = Tally(log_messages.PauseLog().answered)
    with caplog.at_level(logging.INFO, "stepwell"):
        for reason in ("end", PAUSED, PAUSED, "well_lost", PAUSED, "never_seen", "end"):
            tally.answered(reason)
    assert ["resumed" in record.getMessage() for record in caplog.records] == [False, True]
    assert tally.take() == {"misses/paused": 3, "misses/well_lost": 1, "misses/never_seen": 1}


# it lasts -------------------------------------------------------------------------------------------------------------


def test_what_was_paused_is_paused_in_the_next_life(tmp_path: Path) -> None:
    keeper, first = StateWriter(), PauseList(tmp_path)
    pauses = [PauseRecord("recalls", 1.5, 7, 'so "it" is'), PauseRecord("spills", 2.5, 8)]
    assert first.read() == []
    first.keep(pauses, keeper)
    assert keeper.close(PATIENCE) and first.kept
    assert (tmp_path / PAUSED_NAME).stat().st_mode & 0o777 == 0o600
    assert PauseList(tmp_path).read() == pauses


def test_what_is_not_written_is_not_said_to_be(tmp_path: Path) -> None:
    keeper, listed = StateWriter(), PauseList(tmp_path / "gone")
    listed.keep([PauseRecord("recalls", 1.5, 7)], keeper)
    assert keeper.close(PATIENCE)
    assert not listed.kept


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"recalls": 1}',
        b'{"recalls": {"since": 1, "uid": 2}}',
        b'{"recalls": {"since": NaN, "uid": 2, "reason": ""}}',
        b'{"recalls": {"since": "x", "uid": 2, "reason": ""}}',
        b'{"thoughts": {"since": 1, "uid": 2, "reason": ""}}',
        b'{"recalls": {"since": 1, "uid": 1e999, "reason": ""}}',
        b'{"recalls": {"since": 1' + b"0" * 400 + b', "uid": 2, "reason": ""}}',
        b'{"recalls": {"since": 1, "uid": -1, "reason": ""}}',
        b'{"recalls": {"since": 1, "uid": 4294967296, "reason": ""}}',
        b"[" * 100_000,
        None,
    ],
)
def test_all_is_paused_where_what_was_cannot_be_known(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With one message that says how to undo it. None: the file is there and cannot be opened."""
    path = tmp_path / PAUSED_NAME
    if content is None:
        path.symlink_to("nowhere")
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.INFO):
        pauses = PauseList(tmp_path).read(wall=lambda: 3.0)
    assert [(pause.kind, pause.since, pause.uid) for pause in pauses] == [(kind, 3.0, os.geteuid()) for kind in KINDS]
    assert len(caplog.records) == 1
    assert "SW-511" in caplog.text and "stepwell resume" in caplog.text


NUMBERS = st.integers() | st.floats() | st.integers(min_value=10**300, max_value=10**400)
ANYTHING = st.recursive(st.none() | st.booleans() | NUMBERS | st.text(), lambda some: st.lists(some) | st.dictionaries(
    st.sampled_from([*KINDS, "since", "uid", "reason"]) | st.text(), some
), max_leaves=8)  # fmt: skip
NEARLY = st.dictionaries(
    st.sampled_from(KINDS), st.fixed_dictionaries(dict.fromkeys(("since", "uid", "reason"), NUMBERS | ANYTHING))
)


@given((NEARLY | ANYTHING).map(json.dumps).map(str.encode) | st.binary())
def test_no_file_of_pauses_keeps_a_well_from_starting(content: bytes) -> None:
    """And what is read from it can be shown, sent and written."""
    with tempfile.TemporaryDirectory() as home:
        listed = PauseList(Path(home))
        listed.path.write_bytes(content)
        pauses = listed.read()
        wire.frame(m.Paused([m.PauseRow(p.kind, p.since, p.uid, p.reason) for p in pauses], True))
        assert all(map(str, pauses))
        listed.put(pauses)
        assert PauseList(Path(home)).read() == pauses


def test_a_well_begins_with_what_was_paused_and_hands_its_own_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its loop, in whose place somebody resumes recalls and pauses spills."""
    before = PauseRecord("recalls", 1.5, 7, "a test")
    PauseList(tmp_path).write({"recalls": {"since": 1.5, "uid": 7, "reason": "a test"}})
    begun: list[list[PauseRecord]] = []

    def loop(hierarchy: Hierarchy, *_: Any, shell: Shell, **__: Any) -> Any:
        def run() -> str:
            begun.append(hierarchy.pauses.all)
            hierarchy.operator.resume("recalls", 7)
            hierarchy.operator.pause(PauseRecord("spills", 2.5, 8))
            return "it is over"

        return SimpleNamespace(run=run, drain=lambda seconds: True, stop=lambda why: None, reload=lambda: None)

    monkeypatch.setattr(process, "Loop", loop)
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    process._serve(tmp_path, Settings(), 64 << 20, Keyring.ephemeral(), [], [], False, lambda: None, Settings)
    assert begun == [[before]]
    assert PauseList(tmp_path).read() == [PauseRecord("spills", 2.5, 8)]


# the command, and a real well -----------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with home_apart(monkeypatch) as home:
        yield home


def test_a_real_well_is_paused_and_stays_so_in_its_next_life_until_it_is_resumed(home: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--host", "64MiB"]
    for life in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and "serving" in process.stdout.readline()
            try:
                if life == 0:
                    code, said = invoke("pause", "--home", str(home), "--reason", "is it me?")
                    assert code == 0 and said.count("paused: ") == 2 and said.count("is it me?") == 2
                    before = json.loads(invoke("pause", "spills", "--home", str(home), "--json")[1])
                    assert before["kept"]
                    assert [row["reason"] for row in before["paused"]] == ["is it me?"] * 2, "it stays as it was"
                    process.kill()
                    continue
                assert control.paused(home).rows == [m.PauseRow(**row) for row in before["paused"]]
                said = invoke("stats", "--home", str(home))[1]
                assert said.startswith("PAUSED: recalls since ") and "is it me?" in said.splitlines()[0]
                (check,) = places.paused(home)
                assert check.status == "warn" and "stepwell resume" in check.fix
                assert check.text.startswith("recalls since "), "what it is about is said before it"
                assert "recalls are paused" in invoke("explain", "--home", str(home))[1]
                assert json.loads(invoke("explain", "--home", str(home), "--json")[1])["differing"] == []
                assert "spills since" in invoke("resume", "recalls", "--home", str(home))[1]
                assert invoke("resume", "--home", str(home)) == (0, "nothing is paused\n")
                assert invoke("resume", "--home", str(home)) == (0, "nothing is paused\n")
                assert invoke("stats", "--home", str(home))[1].startswith("well ")
                (check,) = places.paused(home)
                assert check.status == "ok"
            finally:
                if life:
                    control.stop(home)
        process.wait(PATIENCE)
        assert next(iter(places.paused(home))).status == ("ok" if life else "warn"), "as the next well will start"
    log = (home / "stepwell.log").read_text()
    assert log.count(f"recalls are paused by user {os.geteuid()}: is it me?") == 1
    assert log.count("`stepwell resume` undoes it") == 2, "and once for each at the next start"


def test_a_pause_that_home_does_not_take_is_in_force_and_said_not_to_last(home: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--host", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "serving" in process.stdout.readline()
        try:
            (home / f"{PAUSED_NAME}.new").mkdir()  # in the way, of root too
            done = subprocess.run(
                [sys.executable, "-m", "stepwell", "pause", "--home", str(home)], capture_output=True, text=True
            )
            assert done.returncode == 1 and done.stdout.count("paused: ") == 2
            assert "SW-512" in done.stderr and "ends with the well" in done.stderr
            assert control.stats(home)["paused_recalls"] == 1
            code, said = invoke("resume", "--home", str(home))
            assert code == 1 and "recalls and spills go on" in said and "paused again" in said
            (home / f"{PAUSED_NAME}.new").rmdir()
            assert invoke("pause", "--home", str(home))[0] == 0, "repeated, it is kept"
        finally:
            control.stop(home)


@pytest.mark.parametrize("named", [True, False])
def test_the_switch_finds_its_well_whatever_the_settings_say_by_now(home: Path, named: bool) -> None:
    """As when an edit went wrong, and the well is to be switched off because of it."""
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--host", "64MiB"]
    own = ["--socket", str(home.parent / "own" / "s")] if named else []
    (home.parent / "own").mkdir(mode=0o700)
    with subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "serving" in process.stdout.readline()
        try:
            for edited in ("linger: 1e400s", f"socket: {home.parent}/own/t", "host: 64MiB", "recal: never"):
                (home / "stepwell.yaml").write_text(f"{edited}\n")
                for asked in ("pause", "stats", "resume"):
                    code, said = invoke(asked, "--home", str(home))
                    assert code == 0, (edited, said)
                assert "SW-1" not in said, edited
            assert invoke("stop", "--home", str(home))[0] == 0
            process.wait(PATIENCE)
        finally:
            process.kill()


def test_a_reason_of_any_length_is_cut_to_what_is_kept(home: Path) -> None:
    prepare_home(home)
    assert invoke("pause", "--home", str(home), "--reason", "a" * (1 << 16))[0] == 0
    assert {len(pause.reason) for pause in PauseList(home).read()} == {MAX_REASON}


def test_without_a_well_the_next_one_begins_paused_and_home_is_locked_meanwhile(home: Path) -> None:
    """As where each well that an engine starts crashes before it can be asked."""
    code, said = invoke("pause", "recalls", "--home", str(home), "--reason", "it crashes")
    assert code == 1 and "SW-505" in said, "there is no home: a misspelt one is not made"
    prepare_home(home)
    code, said = invoke("pause", "recalls", "--home", str(home), "--reason", "it crashes")
    assert code == 0 and "it crashes" in said and said.endswith("no well runs: the next one begins so\n")
    assert [(pause.kind, pause.reason) for pause in PauseList(home).read()] == [("recalls", "it crashes")]
    with lock(rendezvous(home).lock) as taken:
        assert taken is not None
        code, said = invoke("resume", "--home", str(home))
        assert code == 1 and "SW-501" in said, "a well that starts has read it already"
        with pytest.raises(BackendDown, match="SW-501"):
            switch.resume(home, KINDS)
    with lock(home / HOLDER_NAME) as taken:
        assert taken is not None
        code, said = invoke("resume", "--home", str(home))
        assert code == 1 and "SW-501" in said, "a well that is met elsewhere"
        with pytest.raises(BackendDown, match="SW-501"):
            switch.resume(home, KINDS)
    assert len(PauseList(home).read()) == 1
    (home / f"{PAUSED_NAME}.new").mkdir()
    with pytest.raises(AccessDenied, match="SW-601"):
        switch.resume(home, KINDS)
    (home / f"{PAUSED_NAME}.new").rmdir()
    assert invoke("resume", "--home", str(home))[0] == 0
    assert not PauseList(home).read()


@pytest.fixture
def well(tmp_path: Path) -> Iterator[InThread]:
    well = InThread(tmp_path)
    yield well
    well.close()


@pytest.mark.parametrize("message", [m.Pause(["recalls"], ""), m.Resume(["recalls"]), m.PausedQuery(), m.Reload()])
def test_only_the_operator_may_pause_resume_and_reload(well: InThread, message: m.Message) -> None:
    well.users.clear()
    well.users[os.geteuid()] = "a tenant"
    gate = well.loop._server._listeners._gates[0]
    object.__setattr__(gate, "operators", frozenset())
    with pytest.raises(AccessDenied, match="SW-606"), control._admin(Path("/"), well.path, PATIENCE) as admin:
        admin.ask(message, m.Paused)
    assert not well.hierarchy.pauses.all


@pytest.mark.parametrize("kinds", [[], ["thoughts"], ["recalls", "thoughts"]])
def test_what_no_command_sends_is_refused(well: InThread, kinds: list[str]) -> None:
    for message in (m.Pause(kinds), m.Resume(kinds)):
        with pytest.raises(Exception, match="SW-804"), control._admin(Path("/"), well.path, PATIENCE) as admin:
            admin.ask(message, m.Paused)
    assert not well.hierarchy.pauses.all


def test_an_engine_cannot_pause(well: InThread) -> None:
    raw = Raw(well.path)
    raw.send(scheduler(), m.Pause(["recalls"]))
    assert isinstance(raw.read(), m.Welcome)
    assert isinstance(raw.read(), m.Refused) and raw.read() is None
    raw.close()
    assert not well.hierarchy.pauses.all
