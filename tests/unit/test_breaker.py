"""When a tier is asked, and when it is not, by itself and in the hierarchy."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, DeepRig, chain, fill, written

from stepwell.hierarchy.levels.breaker import (
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    OVERDUE_S,
    Breaker,
    State,
    Verdict,
)
from stepwell.testing.clock import SetClock
from stepwell.tiers.faulty import TierFaults

BROKEN = TierFaults(fail=1.0)


class Watched:
    def __init__(self) -> None:
        self.clock = SetClock(100.0)
        self.moves: list[State] = []
        self.breaker = Breaker(self.clock, lambda state, why: self.moves.append(state))
        self.number = 0

    def call(self, verdict: Verdict, seconds: float = 0.0) -> None:
        self.number += 1
        self.breaker.began(self.number)
        self.clock.advance(seconds)
        self.breaker.ended(self.number, verdict)

    def open(self) -> None:
        for _ in range(FAILURES):
            self.call(Verdict.FAILED)
        assert self.breaker.state is State.OPEN


# by itself -----------------------------------------------------------------------------------------------------------


def test_it_opens_after_failures_in_a_row_only() -> None:
    w = Watched()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            w.call(Verdict.FAILED)
        w.call(Verdict.ANSWERED)
    assert w.breaker.admits and not w.moves
    for _ in range(FAILURES - 1):
        w.call(Verdict.FAILED)
    w.call(Verdict.NOTHING)
    assert w.breaker.admits, "no room says nothing about the device"
    w.call(Verdict.FAILED)
    assert not w.breaker.admits
    assert w.moves == [State.OPEN]


def test_after_a_pause_one_call_is_tried_and_closes_it() -> None:
    w = Watched()
    w.open()
    assert w.breaker.next_moment == 100.0 + FIRST_PAUSE_S
    w.clock.advance(FIRST_PAUSE_S - 0.001)
    assert not w.breaker.admits
    w.clock.advance(0.001)
    assert w.breaker.admits and w.breaker.state is State.HALF_OPEN
    w.breaker.began(77)
    assert not w.breaker.admits, "one at a time"
    w.breaker.ended(77, Verdict.NOTHING)
    assert w.breaker.state is State.HALF_OPEN and w.breaker.admits
    w.call(Verdict.ANSWERED)
    assert w.moves == [State.OPEN, State.HALF_OPEN, State.CLOSED]
    w.breaker.began(78)
    assert w.breaker.admits


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_good_time() -> None:
    w = Watched()
    w.open()
    expected = FIRST_PAUSE_S
    for _ in range(8):
        assert w.breaker.next_moment == pytest.approx(w.clock.now() + expected)
        w.clock.advance(expected)
        w.call(Verdict.FAILED)
        assert w.breaker.state is State.OPEN
        expected = min(2 * expected, LONGEST_PAUSE_S)
    w.clock.advance(LONGEST_PAUSE_S)
    w.call(Verdict.ANSWERED)
    assert w.breaker.state is State.CLOSED
    w.open()
    assert w.breaker.next_moment == pytest.approx(w.clock.now() + FIRST_PAUSE_S)


def test_the_age_of_the_oldest_call_is_known() -> None:
    w = Watched()
    assert w.breaker.oldest_s == 0.0
    for call in (1, 2):
        w.breaker.began(call)
        w.clock.advance(0.25)
    assert w.breaker.oldest_s == 0.5
    w.breaker.ended(1, Verdict.ANSWERED)
    assert w.breaker.oldest_s == 0.25


def test_a_call_that_is_overdue_opens_it_until_it_ends() -> None:
    w = Watched()
    w.breaker.began(1)
    w.clock.advance(0.5)
    w.breaker.began(2)
    assert w.breaker.next_moment == 100.0 + OVERDUE_S
    w.clock.advance(0.5)
    assert w.breaker.state is State.OPEN and w.breaker.next_moment is None
    w.clock.advance(1000)
    assert w.breaker.state is State.OPEN
    w.breaker.ended(1, Verdict.ANSWERED)
    assert w.breaker.state is State.OPEN, "the other one is overdue still"
    w.breaker.ended(2, Verdict.ANSWERED)
    assert w.breaker.state is State.HALF_OPEN
    w.call(Verdict.ANSWERED)
    assert w.moves == [State.OPEN, State.HALF_OPEN, State.CLOSED]


def test_an_overdue_call_that_fails_in_the_end_is_no_sign_of_life() -> None:
    w = Watched()
    w.call(Verdict.FAILED, seconds=OVERDUE_S)
    assert w.moves == [State.OPEN]
    assert w.breaker.state is State.OPEN
    assert w.breaker.next_moment == pytest.approx(w.clock.now() + FIRST_PAUSE_S)


def test_a_try_that_hangs_opens_it_again() -> None:
    w = Watched()
    w.open()
    w.clock.advance(FIRST_PAUSE_S)
    assert w.breaker.admits
    w.breaker.began(9)
    w.clock.advance(OVERDUE_S)
    assert w.breaker.state is State.OPEN
    w.breaker.ended(9, Verdict.ANSWERED)
    assert not w.breaker.admits, "late is not well"
    w.clock.advance(2 * FIRST_PAUSE_S)
    assert w.breaker.admits


def test_a_device_that_always_answers_late_is_asked_now_and_then() -> None:
    w = Watched()
    until = w.clock.now() + 300.0
    calls = 0
    while w.clock.now() < until:
        if w.breaker.admits:
            w.breaker.began(calls)
            w.clock.advance(OVERDUE_S / 2)
            assert calls == 0 or not w.breaker.admits
            w.clock.advance(OVERDUE_S)
            w.breaker.ended(calls, Verdict.ANSWERED)
            calls += 1
        w.clock.advance(0.1)
    assert calls < 300.0 / LONGEST_PAUSE_S + 6


# in the hierarchy ----------------------------------------------------------------------------------------------------


def asked(rig: DeepRig, blocks: int) -> tuple[int, str]:
    """What one more request is told: blocks, and why no more."""
    engine = rig.engine
    ticket = engine.ask(chain(blocks))
    rig.settle()
    answer = engine.answer(ticket)
    assert answer.more is False
    engine.release(ticket)
    rig.settle()
    return len(answer.refs), answer.reason


@pytest.fixture
def rig() -> DeepRig:
    rig = written(4, 6)
    rig.engine = rig.join()
    return rig


def test_a_device_that_fails_is_not_asked_again_and_again(rig: DeepRig) -> None:
    rig.faulty.faults = BROKEN
    for _ in range(FAILURES):
        assert asked(rig, 1) == (0, "not_readable")
    reads = rig.below.reads
    for _ in range(5):
        assert asked(rig, 6) == (0, "tier_down")
    assert rig.below.reads == reads
    assert (rig.stat("dict_reads_up"), rig.stat("dict_reads_stopped")) == (0, 1)
    assert rig.hierarchy.next_moment == rig.clock.now() + FIRST_PAUSE_S
    assert rig.engine.spill(chain(6)) == 6, "computed and spilled, as long as it is down"


def test_a_device_that_works_again_serves_again_by_itself(rig: DeepRig) -> None:
    rig.faulty.faults = BROKEN
    for _ in range(FAILURES):
        asked(rig, 1)
    rig.clock.advance(FIRST_PAUSE_S)
    assert asked(rig, 1) == (0, "not_readable"), "the one that tried"
    rig.clock.advance(2 * FIRST_PAUSE_S - 0.001)
    assert asked(rig, 6) == (0, "tier_down"), "a longer pause"
    rig.faulty.faults = HEALTHY
    rig.clock.advance(0.001)
    assert asked(rig, 6) == (6, "end")
    assert rig.stat("dict_reads_up") == 1


def test_a_try_is_one_batch_at_a_time(rig: DeepRig) -> None:
    rig.faulty.faults = BROKEN
    for _ in range(FAILURES):
        asked(rig, 1)
    rig.clock.advance(FIRST_PAUSE_S)
    rig.faulty.faults = HUNG
    ticket = rig.engine.ask(chain(6))
    rig.turns()
    assert (rig.faulty.hanging, len(rig.level.reads.reading)) == (1, 1)
    rig.clock.advance(OVERDUE_S)
    rig.turns()
    assert rig.stat("dict_reads_up") == 0
    rig.engine.release(ticket)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert asked(rig, 1) == (1, "end"), "what it brought late is there"
    assert asked(rig, 6) == (1, "tier_down")
    rig.clock.advance(2 * FIRST_PAUSE_S)
    assert asked(rig, 6) == (6, "end")


def test_the_time_alone_opens_it(rig: DeepRig) -> None:
    """Nobody asks any more; the log and the metrics tell it all the same."""
    rig.faulty.faults = HUNG
    ticket = rig.engine.ask(chain(6))
    rig.turns()
    rig.engine.release(ticket)
    assert rig.hierarchy.next_moment == rig.clock.now() + OVERDUE_S
    rig.clock.advance(OVERDUE_S)
    rig.turns()
    assert rig.hierarchy.counters.tiers["dict"]["reads_stopped"] == 1
    assert rig.hierarchy.next_moment is None, "only its end can change something"
    rig.faulty.release()
    rig.settle()


def test_writes_that_fail_are_stopped_and_go_on_by_themselves(rig: DeepRig) -> None:
    rig.faulty.faults = BROKEN
    for n in range(FAILURES):
        fill(rig.engine, chain(1, 500 + n))
        rig.settle()
    assert rig.stat("dict_writes_up") == 0
    skipped = rig.stat("dict_skipped_failed")
    fill(rig.engine, chain(4, 600))
    rig.settle()
    assert rig.stat("dict_skipped_failed") == skipped
    assert rig.stat("dict_write_queue_bytes") > 0, "they wait, as far as the queue's bytes allow"
    rig.faulty.faults = HEALTHY
    assert asked(rig, 6) == (6, "end"), "reads have a breaker of their own"
    rig.clock.advance(FIRST_PAUSE_S)
    rig.settle()
    assert rig.stat("dict_write_queue_bytes") == 0
    assert len(rig.below.blocks) == 10
    assert rig.stat("dict_writes_up") == 1


def test_who_only_looks_stops_nothing(rig: DeepRig) -> None:
    """A breaker moves when it is looked at. If that is a look at the figures, what waits goes on all the same."""
    rig.faulty.faults = BROKEN
    for n in range(FAILURES):
        fill(rig.engine, chain(1, 500 + n))
        rig.settle()
    fill(rig.engine, chain(4, 600))
    rig.settle()
    rig.faulty.faults = HEALTHY
    rig.clock.advance(FIRST_PAUSE_S)
    assert rig.stat("dict_writes_up") == 1 and rig.stat("dict_write_queue_bytes") > 0
    moment = rig.hierarchy.next_moment
    assert moment is not None and moment <= rig.clock.now()
    rig.settle()
    assert rig.stat("dict_write_queue_bytes") == 0
    assert rig.hierarchy.next_moment is None


def test_blocks_that_are_gone_or_damaged_say_nothing_against_the_device(rig: DeepRig) -> None:
    for id in list(rig.below.blocks):
        rig.damage(id, 4096)
    for blocks in range(1, 7):
        asked(rig, blocks)
    assert rig.stat("dict_reads_up") == 1


def test_nothing_is_written_before_the_tier_knows_what_it_holds(rig: DeepRig) -> None:
    rig.level.recovering = True
    fill(rig.engine, chain(2, 500))
    rig.settle()
    assert not rig.level.writes.writing and rig.stat("dict_write_queue_bytes") > 0
    rig.hierarchy.recover()
    rig.settle()
    assert rig.stat("dict_write_queue_bytes") == 0
