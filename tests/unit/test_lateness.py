"""How long requests may wait for reads that are late: by what they have at stake, and never longer for a tier that
hangs than the stall limit. What either choice has cost is counted."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, DeepRig, at, chain, written
from test_streams import asked as known_of
from test_streams import two_ranks, window
from test_weighing import BLOCK_S, judged, tier_takes, timed

from lab.rig.members import FakeEngine
from stepwell.hierarchy.levels.breaker import FIRST_PAUSE_S, OVERDUE_S, Verdict
from stepwell.hierarchy.levels.speed import LATE_S, LateReads
from stepwell.hierarchy.requests import planner
from stepwell.protocol import messages as m

HEALTHY_S = 0.001
SAVED_S = BLOCK_S * 3 / 4
"""By each block that is read in a quarter of the time that computing it takes."""


def quick(rig: DeepRig, missed: int = 0) -> None:
    """None of the tier's last reads was slow. `missed`: late ones before that did not come."""
    rig.level.reads.healthy._before = HEALTHY_S
    for _ in range(missed):
        rig.level.reads.late.took(10.0, good=True)


def heal(rig: DeepRig) -> None:
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


def hung(rig: DeepRig, engine: FakeEngine, digests: bytes) -> int:
    """The ticket of a request whose reads have begun, and do not end."""
    rig.faulty.faults = HUNG
    ticket = engine.ask(digests)
    rig.turns()
    return ticket


def give_up(rig: DeepRig, engine: FakeEngine, ticket: int, waited_s: float) -> None:
    rig.clock.advance(waited_s)
    engine.scheduler.say(m.Release(ticket, waited_s))
    rig.turns()


# the rule -------------------------------------------------------------------------------------------------------------


def test_a_late_read_is_waited_for_by_the_stake_and_the_chance_that_it_comes() -> None:
    reads = LateReads()
    assert reads.worth_s(0.1) == 0.1, "nothing is known"
    for seconds, good in ((LATE_S, True), (0.001, False)):
        reads.took(seconds, good=good)
    assert reads.worth_s(0.1) == 0.1, "they were not late"
    reads.took(0.1, good=True)
    assert reads.worth_s(0.1) == 0.2
    reads.took(0.1, good=False)
    assert reads.worth_s(0.1) == pytest.approx(0.1, rel=0.05)
    for _ in range(100):
        reads.took(10.0, good=True)
    assert reads.worth_s(0.1) < 0.01, "nobody could have waited for them"
    for _ in range(100):
        reads.took(LATE_S + m.MAX_ALLOWED_S, good=True)
    assert reads.worth_s(0.01) > 0.1, "what was long ago counts no more"


def test_no_stake_is_so_high_that_a_device_that_hangs_costs_more_than_the_stall_limit() -> None:
    assert LateReads().worth_s(1e9) == m.MAX_ALLOWED_S
    rig = written(2, 2)
    quick(rig)
    assert rig.level.allowance_s(1e9) == m.MAX_ALLOWED_S


def test_a_tier_that_seems_to_hang_is_waited_for_as_usual_whatever_is_at_stake() -> None:
    rig = written(2, 6)
    quick(rig)
    assert rig.level.allowance_s(0.1) == 0.1
    hung(rig, rig.join(), chain(6))
    rig.clock.advance(LATE_S + HEALTHY_S)
    assert rig.level.allowance_s(0.1) == 0.1, "with the usual patience it would still be waited for"
    rig.clock.advance(0.001)
    assert rig.level.allowance_s(0.1) == HEALTHY_S
    heal(rig)
    assert rig.level.allowance_s(0.1) >= 0.2, "it was late, and came"


def test_a_tier_that_is_tried_again_is_waited_for_as_usual() -> None:
    rig = written(2, 2)
    quick(rig)
    breaker = rig.level._reads_breaker
    breaker.began(-1)
    rig.clock.advance(OVERDUE_S)
    assert rig.level.down
    breaker.ended(-1, Verdict.ANSWERED)
    rig.clock.advance(FIRST_PAUSE_S)
    assert not rig.level.down and rig.level.allowance_s(0.1) == HEALTHY_S
    breaker.began(-2)
    breaker.ended(-2, Verdict.ANSWERED)
    assert rig.level.allowance_s(0.1) == 0.1


def test_where_nothing_is_kept_nothing_is_waited_for() -> None:
    assert DeepRig(limit=0).level.allowance_s(1e9) == 0.0


# what requests are told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recall", ["auto", "always"])
def test_who_lacks_much_is_told_to_wait_longer_than_who_lacks_little(recall: str) -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    quick(rig, missed=16)
    odds = rig.level.allowance_s(1.0)
    assert odds < 0.1
    ticket = engine.ask(digests, recall=recall)
    rig.turns()
    while engine.answer(ticket).more:
        rig.executor.step()
        rig.turns()
    found = engine._found[ticket]
    assert len(found) > 2
    missing = 16
    for told in found[:-1]:
        missing -= len(told.sources)
        assert told.allow_s == pytest.approx(odds * missing * SAVED_S, rel=0.2)
    engine.release(ticket)


def test_who_waits_for_room_is_told_by_its_own_stake() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    quick(rig, missed=16)
    window(rig, 4)
    odds = rig.level.allowance_s(1.0)
    tickets = [hung(rig, engine, digests[:128]), hung(rig, engine, digests[256:])]
    assert engine.answer(tickets[1]).reason == "pins"
    stake_s = 8 * BLOCK_S - (4 + 8) * BLOCK_S / 4
    assert engine._found[tickets[1]][-1].allow_s == pytest.approx(odds * stake_s, rel=0.2)
    heal(rig)
    for ticket in tickets:
        engine.release(ticket)


def test_who_computes_at_no_known_cost_has_nothing_at_stake() -> None:
    rig = written(2, 6)
    quick(rig)
    engine = rig.join()
    ticket = hung(rig, engine, chain(6))
    engine.answer(ticket)
    assert engine._found[ticket][-1].allow_s == HEALTHY_S
    heal(rig)


def test_a_run_may_land_farther_than_it_was_weighed() -> None:
    """A block that the engine itself is filling ends what is weighed, and not what is recalled."""
    rig, engine, digests = judged(BLOCK_S / 4)
    leases, _ = engine.reserve(at(digests, 2), parent=at(digests, 1))
    assert all(leases)
    ticket = engine.ask(digests)
    rig.settle()
    assert engine.answer(ticket).reason == "filling"
    engine.workers[0].say(m.Filled(leases, []))
    rig.settle()
    assert len(engine.answer(ticket).refs) == 16
    engine.release(ticket)


# what it has cost -----------------------------------------------------------------------------------------------------


def test_what_waiting_and_giving_up_have_cost_is_counted() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    seconds = rig.hierarchy.counters.seconds
    give_up(rig, engine, hung(rig, engine, digests), 0.3)
    assert seconds["waited_in_vain_seconds"] == pytest.approx(0.3)
    assert "given_up_too_soon_seconds" not in seconds, "it may never come"
    rig.clock.advance(0.2)
    heal(rig)
    assert seconds["given_up_too_soon_seconds"] == pytest.approx(16 * SAVED_S - 0.2, rel=0.2)


def test_what_came_later_than_computing_took_was_not_given_up_too_soon() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    give_up(rig, engine, hung(rig, engine, digests), 0.3)
    rig.clock.advance(16 * BLOCK_S)
    heal(rig)
    assert "given_up_too_soon_seconds" not in rig.hierarchy.counters.seconds


def test_who_needs_its_blocks_no_more_has_no_regret() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    engine.release(hung(rig, engine, digests))
    heal(rig)
    assert not {"waited_in_vain_seconds", "given_up_too_soon_seconds"} & rig.hierarchy.counters.seconds.keys()


def test_a_stream_that_one_rank_gives_up_is_regretted_once() -> None:
    rig, engine = two_ranks()
    timed(engine)
    tier_takes(rig, BLOCK_S / 4)
    transfer = engine.stream(known_of(engine, chain(6)))
    rig.settle()
    rig.clock.advance(0.2)
    for rank in (0, 1):
        engine.workers[rank].say(m.Recalled([transfer]))
        rig.turns()
    heal(rig)
    seconds = rig.hierarchy.counters.seconds
    assert seconds["waited_in_vain_seconds"] == pytest.approx(0.2)
    assert 0 < seconds["given_up_too_soon_seconds"] < 6 * BLOCK_S


def test_so_many_blocks_that_were_given_up_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_GIVEN_UP", 2)
    chains = [chain(2, start) for start in range(0, 500, 100)]
    rig = written(16, 10, digests=b"".join(chains))
    engine = rig.join()
    for digests in chains:
        give_up(rig, engine, hung(rig, engine, digests), 0.01)
    assert len(rig.hierarchy._planner._given_up) == 2
    heal(rig)
