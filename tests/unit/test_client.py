"""The engine side's clients against a hand-played well: what must hold at moments that a real one rarely gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from played import PlayedWell

from stepwell.client import membership as joining
from stepwell.client import scheduler as scheduler_module
from stepwell.client.identity import EngineIdentity
from stepwell.client.membership import Membership
from stepwell.client.patience import MAX_LIMIT_S, PATIENCE, STALL_S, TOTAL_S, UNANSWERED_S, Patience
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.errors import StepwellError, Unsupported, as_error
from stepwell.io.memory import SharedMemory
from stepwell.protocol import messages as m
from stepwell.protocol.link import Link, Receiver
from stepwell.testing.clock import SetClock

D = bytes(32)


def scheduler(well: PlayedWell, told: list[StepwellError] | None = None, **options: Any) -> SchedulerClient:
    errors = told if told is not None else []
    identity = EngineIdentity("e", 1, 4096, 16, D, D, "x")
    client = SchedulerClient(identity, lambda: D, lambda: well.dial, trouble=errors.append, threaded=False, **options)
    well.receivers[0].received(m.Ready(7), ())
    return client


def found(ask: PrefixQuestion, blocks: int, *, more: bool, reason: str = "") -> m.Found:
    return m.Found(ask.ticket, ask.blocks, bytes(blocks * m.SLOT_REF.itemsize), more, reason)


def released(well: PlayedWell) -> int:
    return sum(isinstance(message, m.Release) for message in well.said)


def test_an_ask_that_is_finished_is_released_when_its_answer_has_come() -> None:
    """Not before: a release that overtakes the answer would leave the blocks unused in the well's eyes."""
    well = PlayedWell()
    client = scheduler(well)
    answer = well.receivers[0].received
    ask = client.ask(D + D + D, 0, 1)
    assert ask is not None
    client.finish(ask)
    answer(found(ask, 2, more=True), ())
    assert not released(well)
    answer(found(ask, 1, more=False, reason="end"), ())
    assert (released(well), ask.blocks, ask.final) == (1, 3, True)
    client.release(ask)
    assert released(well) == 1


def test_what_is_read_is_waited_for_longer_and_a_silent_well_is_not() -> None:
    clock, well = SetClock(100.0), PlayedWell()
    patience = Patience(reading_s=1.0, block_s=0.5)
    client = scheduler(well, patience=patience, clock=clock.now)
    asks = [client.ask(D + D + D, 0, order) for order in range(3)]
    assert all(ask is not None and not client.settle(ask, 0.0) for ask in asks)
    silent, reading, mapping = asks
    assert silent is not None and reading is not None and mapping is not None
    well.receivers[0].received(m.Found(reading.ticket, 0, b"", True, "staging", known=3, ends="end"), ())
    well.receivers[0].received(m.Found(mapping.ticket, 0, b"", True, "mapping"), ())
    clock.advance(STALL_S + UNANSWERED_S)
    assert client.settle(mapping, 0.0) and not client.settle(reading, 0.0) and not client.settle(silent, 0.0)
    reading.news = clock.now()
    clock.advance(1.0)
    assert client.settle(silent, 0.0), "it may be starved, once"
    again = client.ask(D, 0, 4)
    assert again is not None and not client.settle(again, 0.0)
    clock.advance(STALL_S + 0.01)
    assert client.settle(again, 0.0), "it has been silent before"
    reading.news = clock.now()
    for _ in range(2):  # news keep it going, up to the total
        clock.advance(0.9)
        reading.news = clock.now()
        assert not client.settle(reading, 0.0)
    clock.advance(0.6)
    reading.news = clock.now()
    assert client.settle(reading, 0.0), "2 s, and 0.5 for each of three blocks"


def test_what_is_still_read_and_was_offered_does_not_give_way() -> None:
    well = PlayedWell()
    client = scheduler(well)
    answer = well.receivers[0].received
    ask, other = client.ask(D + D + D, 0, 1), client.ask(D, 0, 2)
    assert ask is not None and other is not None
    for each in (ask, other):
        answer(m.Found(each.ticket, 0, b"", True, "staging", known=2, ends="end"), ())
    assert client.offer(ask, streamed=True) == 2 and client.offer(other) == 0
    for each in (ask, other):
        answer(m.GiveWay(each.ticket), ())
    assert (ask.known, other.known, released(well)) == (2, 0, 1)
    transfer, limits = client.stream(ask, 0, 2)
    assert well.said[-1] == m.Recall(ask.ticket, transfer, 0, 2, False, 0.0, streamed=True)
    assert (limits.stall_s, limits.total_s) == (STALL_S, TOTAL_S)
    behind = client.ask(D, 0, 3)
    assert behind is not None and not client.settle(behind, 0.0) and behind.sharing == 2
    client.stream_ended(transfer)
    another = client.ask(D, 0, 4)
    assert another is not None and not client.settle(another, 0.0) and another.sharing == 2, "no stream"


def test_what_gives_way_to_another_request_waits_again() -> None:
    """It is as if its question had just been asked, but for its limits; and a final answer is none any more."""
    clock, well = SetClock(100.0), PlayedWell()
    client = scheduler(well, clock=clock.now)
    answer = well.receivers[0].received
    ask = client.ask(D + D + D, 0, 1)
    assert ask is not None and not client.settle(ask, 0.0)
    answer(found(ask, 2, more=True, reason="staging"), ())
    answer(found(ask, 1, more=False, reason="end"), ())
    clock.advance(STALL_S - 0.01)
    assert client.settle(ask, 0.0) and ask.settled
    answer(m.GiveWay(ask.ticket), ())
    assert well.said[-1] == m.Release(ask.ticket, waits=True)
    assert client.offer(ask, streamed=True) == 0 and not ask.settled
    assert not client.settle(ask, 0.0), "it waits for room"
    answer(found(ask, 1, more=False, reason="end"), ())
    assert client.settle(ask, 0.0) and client.offer(ask) == 1
    assert len(client.recall(ask, 0, 1)[1]) == 1
    late = client.ask(D, 0, 1)
    assert late is not None and not client.settle(late, 0.0)
    answer(found(late, 0, more=True, reason="staging"), ())
    clock.advance(STALL_S - 0.01)
    answer(m.GiveWay(late.ticket), ())
    assert not client.settle(late, 0.0)
    clock.advance(0.01)
    assert client.settle(late, 0.0), "its limit is what it was: this was no news"


def test_what_is_unwanted_gives_way_for_good() -> None:
    well = PlayedWell()
    client = scheduler(well)
    ask = client.ask(D, 0, 1)
    assert ask is not None
    client.finish(ask)
    well.receivers[0].received(m.GiveWay(ask.ticket), ())
    assert well.said[-1] == m.Release(ask.ticket) and (ask.final, ask.reason) == (True, "gave_way")


def test_asks_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The well would end a session with more."""
    monkeypatch.setattr(scheduler_module, "MAX_ASKS", 2)
    well = PlayedWell()
    client = scheduler(well)
    asks = [client.ask(D, 0, order) for order in range(3)]
    assert asks[0] is not None and asks[1] is not None and asks[2] is None
    assert sum(isinstance(message, m.Ask) for message in well.said) == 2
    client.release(asks[0])
    assert client.ask(D, 0, 3) is not None


def looking(well: PlayedWell, *flags: str) -> SchedulerClient:
    client = scheduler(well)
    well.receivers[0].received(m.Welcome(7, m.PROTOCOL, "played", 0, flags=[*flags]), ())
    return client


def test_a_look_is_answered_once_with_a_byte_for_each_block() -> None:
    well = PlayedWell()
    client = looking(well, m.LOOKS)
    look, other = client.look(D + D, 5), client.look(D, 0)
    assert look is not None and other is not None
    assert well.said[-2:] == [m.Look(look.ticket, 5, D + D), m.Look(other.ticket, 0, D)]
    client.forget_look(other)
    for ticket in (other.ticket, look.ticket, look.ticket):
        well.receivers[0].received(m.Seen(ticket, b"\0\1"), ())
        well.receivers[0].received(m.Seen(ticket, b"\1\1"), ())
    assert (look.here, other.here) == (b"\0\1", None) and not client._looks


def test_a_look_that_a_lost_session_leaves_open_finds_nothing() -> None:
    well = PlayedWell()
    client = looking(well, m.LOOKS)
    look = client.look(D + D, 0)
    assert look is not None and look.here is None
    well.receivers[0].lost()
    assert look.here == bytes(2)
    assert client.look(D, 0) is None and not client._looks, "there is no session"


def test_a_well_of_before_is_asked_for_no_look() -> None:
    """It would end the session: it does not know that message."""
    well = PlayedWell()
    client = looking(well)
    assert client.look(D, 0) is None and client.ask(D, 0, 1) is not None
    assert not any(isinstance(message, m.Look) for message in well.said)
    assert looking(PlayedWell(), m.LOOKS).look(b"", 0) is None, "there is nothing to look for"


def test_a_look_that_is_not_posted_does_not_count() -> None:
    """The link has just ended, and the session not yet."""
    client = looking(PlayedWell(), m.LOOKS)
    client.membership._outbox = None
    assert client.look(D, 0) is None and not client._looks


def test_looks_are_bounded_together_with_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_ASKS", 2)
    client = looking(PlayedWell(), m.LOOKS)
    ask, look = client.ask(D, 0, 1), client.look(D, 0)
    assert ask is not None and look is not None
    assert client.look(D, 0) is None and client.ask(D, 0, 2) is None
    client.forget_look(look)
    again = client.look(D, 0)
    assert again is not None
    client.release(ask)
    assert client.ask(D, 0, 3) is not None and client.look(D, 0) is None


def test_a_well_may_ask_for_so_much_patience_and_no_more() -> None:
    limit = STALL_S + m.MAX_ALLOWED_S
    for allowed in (m.MAX_ALLOWED_S, 10.0, float("inf")):
        assert not PATIENCE.over(1.0, 1.0, 1.0 + limit - 0.01, allowed)
        assert PATIENCE.over(1.0, 1.0, 1.0 + limit + 0.01, allowed)
    for nonsense in (-5.0, float("-inf")):
        assert not PATIENCE.over(1.0, 1.0, 1.0 + STALL_S - 0.01, nonsense)


@pytest.mark.parametrize(("more", "reason"), [(False, "end"), (True, "pins")])
@pytest.mark.parametrize("finished_first", [False, True])
def test_a_finished_ask_neither_waits_in_the_well_nor_outlives_its_answer(
    more: bool, reason: str, finished_first: bool
) -> None:
    well = PlayedWell()
    client = scheduler(well)
    ask = client.ask(D + D + D, 0, 1)
    assert ask is not None
    steps = [
        lambda: client.finish(ask),
        lambda: well.receivers[0].received(found(ask, 2, more=more, reason=reason), ()),
    ]
    for step in steps if finished_first else reversed(steps):
        step()
    assert (released(well), ask.blocks, ask.final) == (1, 2, True)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_spill_that_nobody_wants_is_given_back_whenever_its_grant_comes(granted_first: bool) -> None:
    well = PlayedWell()
    client = scheduler(well)
    spill = client.reserve(b"", D + D + D, 0)
    assert spill is not None
    grant = m.Granted(spill.number, [11, 0, 13], bytes(2 * m.SLOT_REF.itemsize))
    steps = [lambda: well.receivers[0].received(grant, ()), lambda: client.abandon(spill, 0)]
    for step in steps if granted_first else reversed(steps):
        step()
    assert [a.leases for a in well.said if isinstance(a, m.Abandon)] == [[11, 13]]


def test_only_what_is_left_of_a_spill_is_given_back() -> None:
    well = PlayedWell()
    client = scheduler(well)
    spill = client.reserve(b"", D + D + D, 0)
    assert spill is not None
    well.receivers[0].received(m.Granted(spill.number, [11, 12, 13], bytes(3 * m.SLOT_REF.itemsize)), ())
    client.abandon(spill, 2)
    assert [a.leases for a in well.said if isinstance(a, m.Abandon)] == [[13]]


def test_counts_reach_the_well_when_the_engine_is_idle() -> None:
    well = PlayedWell()
    client = scheduler(well)
    client.count("missed_too_slow")
    client.report(idle=True)
    assert [r.counts for r in well.said if isinstance(r, m.Report)] == [{"missed_too_slow": 1}]


STALL = 1.001 * STALL_S


class Queue:
    """A scheduler whose requests wait; `poll` is one step of it in which it would take those that are named."""

    def __init__(self, reasons: str = "staging staging") -> None:
        self.well, self.clock = PlayedWell(), SetClock(100.0)
        self.client = scheduler(self.well)
        self.client._clock = self.clock.now
        asks = [self.client.ask(D + D, 0, order) for order, _ in enumerate(reasons.split())]
        self.asks = [ask for ask in asks if ask is not None]
        for ask, reason in zip(self.asks, reasons.split(), strict=True):
            self.tell(ask, 0, reason)

    def tell(
        self,
        ask: PrefixQuestion,
        blocks: int,
        reason: str,
        *,
        more: bool = True,
        allow_s: float = 0.0,
        limit_s: float = 0.0,
    ) -> None:
        rows = bytes(blocks * m.SLOT_REF.itemsize)
        found = m.Found(ask.ticket, ask.blocks, rows, more, reason, bytes(blocks), allow_s, limit_s)
        self.well.receivers[0].received(found, ())

    def moves(self, *apart: PrefixQuestion, whole: bool = False) -> None:
        moved = m.LineMoved([ask.ticket for ask in apart], len(self.asks), whole)
        self.well.receivers[0].received(moved, ())

    def poll(self, *asks: PrefixQuestion, after: float = 0.0) -> list[bool]:
        self.clock.advance(after)
        return [self.client.settle(ask, 0) for ask in asks]


@pytest.mark.parametrize("reason", ["staging", "filling"])
@pytest.mark.parametrize(
    ("limit_s", "total_s"), [(0.0, TOTAL_S), (0.5, 0.5), (7.0, 7.0), (1e9, MAX_LIMIT_S), (-1.0, TOTAL_S)]
)
def test_a_recall_may_take_what_the_well_says_that_it_is_worth(limit_s: float, total_s: float, reason: str) -> None:
    q = Queue(reason)
    (ask,) = q.asks
    assert q.poll(ask) == [False]
    waited = 0.0
    while not q.poll(ask)[0]:
        q.clock.advance(STALL_S / 2)
        waited += STALL_S / 2
        q.tell(ask, 1, reason, limit_s=limit_s)
        assert waited < 2 * MAX_LIMIT_S
    assert waited == pytest.approx(total_s, abs=STALL_S)
    q.client.release(ask)
    (released,) = [said for said in q.well.said if isinstance(said, m.Release)]
    assert released.waited_s == pytest.approx(waited)


def test_a_request_that_never_waited_says_so() -> None:
    q = Queue("staging staging")
    q.poll(q.asks[1])
    for ask in q.asks:
        q.client.release(ask)
    assert [said.waited_s for said in q.well.said if isinstance(said, m.Release)] == [0.0, 0.0]


def test_timings_are_told_with_the_counts_and_the_latest_are_kept() -> None:
    well = PlayedWell()
    client = scheduler(well)
    steps = [(n, float(n), 0.5) for n in range(1, m.MAX_TIMINGS + 9)]
    client.timed(steps, [(5, 0.25)])
    client.report(idle=True)
    client.report(idle=True)
    (told,) = [said for said in well.said if isinstance(said, m.Timings)]
    assert told == m.Timings(steps[8:], [(5, 0.25)])


@pytest.mark.parametrize("reason", ["staging", "pins", "no_room"])
def test_who_waits_in_line_is_stalled_when_nobody_gets_anything(reason: str) -> None:
    q = Queue(f"staging {reason} filling")
    first, second, alone = q.asks
    assert q.poll(first, second, alone) == [False] * 3
    for _ in range(5):
        q.clock.advance(STALL_S * 0.9)
        q.tell(first, 1, "staging")
        q.moves(first)
        late = q.poll(first, second, alone)
        assert late[:2] == [False, False]
    assert late[2], "what it waits for has nothing to do with the others"
    assert q.poll(first, second, after=STALL) == [True, True]


def test_pins_that_are_given_back_are_news_to_who_waits_for_them() -> None:
    for ends in (lambda client, ask: client.recall(ask, 0, 1), lambda client, ask: client.release(ask)):
        q = Queue("staging pins")
        first, second = q.asks
        q.tell(first, 1, "staging")
        q.poll(first, second)
        q.clock.advance(STALL)
        ends(q.client, first)
        assert q.poll(second) == [False]
        assert q.poll(second, after=STALL) == [True]


def test_a_request_that_gives_up_with_nothing_is_no_news() -> None:
    q = Queue("staging pins")
    first, second = q.asks
    q.poll(first, second)
    q.clock.advance(STALL)
    q.client.finish(first)
    assert q.poll(second) == [True]


def test_what_the_well_allows_for_a_block_holds_for_all_in_line() -> None:
    q = Queue("staging pins")
    first, second = q.asks
    q.tell(first, 0, "staging", allow_s=m.MAX_ALLOWED_S)
    q.tell(second, 0, "pins", allow_s=m.MAX_ALLOWED_S)
    q.poll(first, second)
    assert q.poll(first, second, after=STALL_S + 0.9 * m.MAX_ALLOWED_S) == [False, False]
    assert q.poll(first, second, after=0.101 * m.MAX_ALLOWED_S) == [True, True]


def test_who_waits_for_no_tier_is_allowed_nothing() -> None:
    q = Queue("filling mapping")
    for ask, reason in zip(q.asks, ("filling", "mapping"), strict=True):
        q.tell(ask, 0, reason, allow_s=m.MAX_ALLOWED_S)
    q.poll(*q.asks)
    assert q.poll(*q.asks, after=STALL) == [True, True]


def test_a_silent_well_is_waited_for_once() -> None:
    q = Queue("")
    first, second, third = (q.client.ask(D, 0, order) for order in range(3))
    assert first is not None and second is not None and third is not None
    q.poll(first)
    assert q.poll(first, after=STALL_S + 0.9 * UNANSWERED_S) == [False], "its loop may wait for a processor"
    assert q.poll(first, second, after=0.101 * UNANSWERED_S) == [True, False]
    assert q.poll(second, after=STALL) == [True]
    q.tell(second, 0, "staging")
    q.poll(third)
    assert q.poll(third, after=STALL) == [False], "it speaks again"


def test_a_silent_well_takes_nothing_from_those_that_wait_for_a_tier() -> None:
    q = Queue("staging")
    (first,) = q.asks
    q.tell(first, 0, "staging", allow_s=m.MAX_ALLOWED_S)
    silent = q.client.ask(D, 0, 1)
    assert silent is not None
    q.poll(first, silent)
    assert q.poll(first, silent, after=1.001 * (STALL_S + UNANSWERED_S)) == [False, True]


def test_a_slice_of_a_long_answer_leaves_nobody_out_of_the_line() -> None:
    q = Queue("staging")
    (ask,) = q.asks
    q.tell(ask, 0, "staging", allow_s=m.MAX_ALLOWED_S)
    q.tell(ask, 128, "", allow_s=m.MAX_ALLOWED_S)
    q.poll(ask)
    assert q.poll(ask, after=STALL) == [False]


def busy(q: Queue, seconds: float) -> None:
    """The tier does something for the first meanwhile."""
    until = q.clock.now() + seconds
    while q.clock.now() < until:
        q.poll(*q.asks)
        q.tell(q.asks[0], 1, "staging")
        q.moves(q.asks[0])
        q.clock.advance(min(STALL_S / 2, until - q.clock.now()))


def test_time_in_line_begins_anew_when_another_one_has_got_all() -> None:
    q = Queue("staging pins")
    first, second = q.asks
    busy(q, 0.9 * TOTAL_S)
    q.tell(first, 1, "end", more=False)
    q.moves(whole=True)
    assert q.poll(first, second) == [True, False]
    q.client.recall(first, 0, 1)
    q.asks = [second]
    busy(q, 0.9 * TOTAL_S)
    assert q.poll(second) == [False]
    busy(q, 0.11 * TOTAL_S)
    assert q.poll(second) == [True]


def test_who_gets_only_a_part_lets_the_others_go_as_well() -> None:
    q = Queue("staging pins")
    first, second = q.asks
    busy(q, 0.99 * TOTAL_S)
    assert q.poll(first, second) == [False, False]
    busy(q, 0.02 * TOTAL_S)
    assert q.client.settle(first, 0)
    q.client.recall(first, 0, 1)
    assert q.client.settle(second, 0)


@pytest.mark.parametrize("reason", ["staging", "pins", "no_room"])
def test_nothing_renews_the_cap(reason: str) -> None:
    """Requests overtake it all the time, and each gets all that it asked for."""
    q = Queue(f"staging {reason}")
    first, waiting = q.asks
    q.poll(first, waiting)
    q.tell(first, 1, "end", more=False)
    q.client.recall(first, 0, 1)
    over, turns = [False], 0
    while over == [False]:
        before = q.client.ask(D, 0, -1 - turns)
        assert before is not None
        q.asks = [before, waiting]
        q.tell(before, 0, "staging")
        busy(q, 0.3 * TOTAL_S)
        q.tell(before, 1, "end", more=False)
        q.moves(whole=True)
        q.client.recall(before, 0, 1)
        over, turns = q.poll(waiting), turns + 1
        assert turns < 20
    assert q.clock.now() - waiting.first_poll == pytest.approx(2 * TOTAL_S, abs=0.3 * TOTAL_S)


def test_a_cap_is_a_minute_at_most_however_many_wait_before() -> None:
    """Computing each of two takes 45 s, says the well, and the first gets all that it asked for after 40 s."""
    q = Queue("staging staging")
    first, second = q.asks
    before, worth_s = [first], 0.75 * MAX_LIMIT_S
    while q.poll(*before, second) == [False] * len([*before, second]):
        q.clock.advance(0.9 * STALL_S)
        for ask in (*before, second):
            q.tell(ask, 1, "staging", limit_s=worth_s)
        if before and q.clock.now() - first.first_poll >= 0.9 * worth_s:
            q.tell(first, 1, "end", more=False)
            q.moves(whole=True)
            q.client.recall(first, 0, 1)
            before = []
        assert q.clock.now() - second.first_poll < 2 * MAX_LIMIT_S
    assert not before and q.clock.now() - second.first_poll == pytest.approx(MAX_LIMIT_S, abs=STALL_S)


@pytest.mark.parametrize(
    ("told", "polls", "sharing"),
    [
        pytest.param("staging", 0, 1, id="in line"),
        pytest.param("", 1, 1, id="may be in line"),
        pytest.param("", 0, 0, id="never polled"),
        pytest.param("mapping", 1, 0, id="waits for something else"),
        pytest.param("end", 0, 0, id="has all"),
        pytest.param("staging", 2, 0, id="has waited for too long"),
    ],
)
def test_only_requests_that_wait_in_line_lengthen_the_cap(told: str, polls: int, sharing: int) -> None:
    q = Queue("")
    first, second = (q.client.ask(D, 0, order) for order in range(2))
    assert first is not None and second is not None
    if told:
        q.tell(first, 0, told, more=told != "end")
    for _ in range(polls):
        q.poll(first)
        q.clock.advance(STALL)
    q.poll(second)
    assert second.sharing == sharing


@pytest.mark.parametrize("reason", ["staging", "pins", "no_room"])
def test_whoever_waits_is_kept_waiting_by_a_line_that_moves_but_not_who_is_apart(reason: str) -> None:
    q = Queue(f"{reason} staging {reason}")
    waiting, other, apart = q.asks
    q.poll(waiting, other, apart)
    for _ in range(4):
        q.clock.advance(0.3 * STALL)
        q.tell(other, 1, "staging")
        if reason == "staging":
            q.moves(apart)
    assert q.poll(waiting, other) == [False, False], "whoever is before it"
    assert q.poll(apart) == [reason == "staging"], "who waits for room heard that another one got something"


def test_that_another_one_has_all_says_nothing_of_a_read_that_hangs() -> None:
    q = Queue("staging staging")
    hung, other = q.asks
    q.poll(hung, other)
    q.clock.advance(0.9 * STALL)
    q.moves(hung, whole=True)
    assert q.poll(hung, other, after=0.2 * STALL) == [True, False]


def test_what_others_are_read_renews_no_wait_of_a_read_that_hangs() -> None:
    q = Queue("staging staging")
    hung, other = q.asks
    q.poll(hung, other)
    q.clock.advance(STALL)
    q.tell(other, 1, "staging")
    q.client.recall(other, 0, 1)
    assert q.poll(hung) == [True], "the well did not say that the line moves for it"


def test_as_many_as_the_well_says_lengthen_the_cap() -> None:
    """Of other engines, too, and if they came later."""
    q = Queue("staging")
    (ask,) = q.asks
    q.poll(ask)
    assert ask.sharing == 0
    for sharing in (5, 2):
        q.well.receivers[0].received(m.LineMoved([], sharing), ())
    assert ask.sharing == 4
    mapping = q.client.ask(D, 0, 1)
    assert mapping is not None
    q.tell(mapping, 0, "mapping")
    q.well.receivers[0].received(m.LineMoved([], 9), ())
    assert (ask.sharing, mapping.sharing) == (8, 0), "one that waits for nothing that they have"


@pytest.mark.parametrize("order", [0, 2])
def test_hits_in_host_memory_keep_nobody_waiting_for_a_tier(order: int) -> None:
    """Requests that never waited themselves, before it in line or behind it."""
    q = Queue("mapping staging mapping")
    hit, waiting = q.asks[order], q.asks[1]
    q.poll(waiting)
    for _ in range(3):
        q.clock.advance(STALL / 3)
        q.tell(hit, 1, "")
    q.tell(hit, 1, "end", more=False)
    q.client.recall(hit, 0, 1)
    assert q.poll(waiting) == [True]


def test_hits_in_host_memory_keep_nobody_waiting_for_room() -> None:
    q = Queue("mapping pins")
    hit, waiting = q.asks
    q.poll(waiting)
    for _ in range(3):
        q.clock.advance(STALL / 3)
        q.tell(hit, 1, "")
    assert q.poll(waiting) == [True], "it has given nothing back"


class Refusing(PlayedWell):
    """Refuses every hello at once."""

    code = "SW-401"

    def dial(self, hello: m.Hello, receiver: Receiver) -> Link:
        super().dial(hello, receiver)
        receiver.received(m.Refused(self.code, "w", "y", "f"), ())
        receiver.lost()
        return self


def test_a_refused_member_tries_ever_more_rarely_and_tells_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[StepwellError] = []
    waits: list[float] = []
    well = Refusing()

    class Quiet:
        def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
            assert isinstance(message, m.Refused)
            member.trouble(joining_error)

        def lost(self) -> None: ...

    joining_error = as_error("SW-801", "w", "y", "f")
    member = Membership(lambda: m.Hello(1, "worker"), lambda: well.dial, Quiet(), told.append)

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds or 0.0)
        if len(waits) == 8:
            member.close()
        return False

    monkeypatch.setattr(member._closed, "wait", wait)
    member._run()
    assert len(told) == 1
    assert waits == sorted(waits) and waits[-1] == joining.LONGEST_WAIT, waits

    waits.clear()
    told.clear()
    joining_error = as_error("SW-401", "w", "y", "f")
    member = Membership(lambda: m.Hello(1, "worker"), lambda: well.dial, Quiet(), told.append)
    monkeypatch.setattr(member._closed, "wait", wait)
    member._run()
    assert waits == [joining.PERSON_WAIT] * 8, "a person must act first"


def test_without_memfd_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(Unsupported) as raised:
        SharedMemory(4096)
    assert raised.value.code == "SW-702"
