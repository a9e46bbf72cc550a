"""Turns: who is read for next, against equal sharing worked out in small steps; and as the well has them."""

from __future__ import annotations

import random

import pytest
from deep import HEALTHY, HUNG, DeepRig, chain, written
from test_levels import READERS, busy
from test_streams import window

from lab.rig.members import FakeEngine
from stepwell.hierarchy.requests.answers import MOVES_S
from stepwell.hierarchy.requests.pins import AT_LEAST
from stepwell.policies.turns import UNAWAITED, RequestTurn, Turns
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT

# the rule -------------------------------------------------------------------------------------------------------------


def shared_equally(comes: list[tuple[int, int]]) -> list[float]:
    """When each, (moment, bytes), has all of its bytes if a byte takes one unit of time and all share equally."""
    left, ends, now = {n: float(nbytes) for n, (_, nbytes) in enumerate(comes)}, [0.0] * len(comes), 0.0
    while left:
        here = [n for n in left if comes[n][0] <= now]
        later = min((at for at, _ in comes if at > now), default=float("inf"))
        step = min(later - now, min(left[n] for n in here) * len(here) if here else float("inf"))
        now += step
        for n in here:
            left[n] -= step / len(here)
            if left[n] < 1e-6:
                ends[n] = now
                del left[n]
    return ends


def by_turns(comes: list[tuple[int, int]]) -> list[float]:
    """The same if it is served byte by byte, by turns."""
    turns, ends = Turns(), [0.0] * len(comes)
    waiting: dict[int, RequestTurn] = {}
    now = 0
    while now < 2 * sum(nbytes for _, nbytes in comes) + max(at for at, _ in comes):
        for n, (at, nbytes) in enumerate(comes):
            if at == now:
                waiting[n] = turns.join(n)
                turns.wants(waiting[n], nbytes)
        now += 1
        if waiting:
            first = min(waiting, key=lambda n: waiting[n].place)
            turns.served(waiting[first], 1)
            if not waiting[first].unserved:
                ends[first] = now
                del waiting[first]
    assert not turns.unserved
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_nobody_ends_later_than_if_all_shared_equally(seed: int) -> None:
    """However many short ones come: a long one among n waits n times as long as alone at most."""
    dice = random.Random(seed)
    comes = sorted((dice.randrange(200), dice.choice((1, 2, 5, dice.randint(30, 60)))) for _ in range(30))
    for turn, equal in zip(by_turns(comes), shared_equally(comes), strict=True):
        assert turn <= equal + 1.001


def test_the_short_one_goes_first_and_equal_ones_as_they_came() -> None:
    assert by_turns([(0, 10), (1, 2), (2, 12), (2, 12)]) == [12, 3, 24, 36]


def test_who_was_preempted_goes_before_all_others() -> None:
    turns = Turns()
    places = [turns.join(order).place for order in (7, -1, 3, -2)]
    turns.wants(last := turns.join(8), 5)
    assert sorted((*places, last.place, UNAWAITED.place)) == [
        places[3], places[1], places[0], places[2], last.place, UNAWAITED.place
    ]  # fmt: skip


def test_who_gives_up_shares_no_more() -> None:
    """One that wanted much is gone: the next to come is behind what others would have by now without it."""
    turns = Turns()
    first, gone = turns.join(0), turns.join(1)
    turns.wants(first, 100)
    turns.wants(gone, 1000)
    turns.served(first, 20)
    turns.wants(gone, 0)
    turns.served(gone, 500)  # of blocks that others may want, too: not in its turn
    turns.served(first, 20)
    assert turns.place(turns.join(2), 10)[0] == 40.0
    turns.wants(first, 0)
    assert not (turns.unserved or turns._sharing)


def test_who_wants_more_goes_on_from_its_end() -> None:
    turns = Turns()
    turn, other = turns.join(0), turns.join(1)
    turns.wants(turn, 10)
    turns.wants(other, 12)
    assert turns.place(turn, 15) == (15.0, 1) and turn.place == (10.0, 1)
    turns.wants(turn, 15)
    assert min(turn.place, other.place) == other.place


def test_ends_that_have_moved_are_forgotten() -> None:
    turns = Turns()
    turns.wants(stays := turns.join(0), 1 << 30)
    for n in range(1000):
        turns.wants(turn := turns.join(n), 10)
        turns.wants(turn, 0)
    assert len(turns._to_end) < 200 and turns._sharing == {stays}


# the well -------------------------------------------------------------------------------------------------------------


def test_what_was_wanted_is_withdrawn_by_whoever_ends() -> None:
    rig = written(4, 8)
    engine, turns = rig.join(), rig.hierarchy.stack.turns
    rig.faulty.faults = HUNG
    tickets = [engine.ask(chain(8)), engine.ask(chain(4))]
    rig.turns()
    assert turns.unserved > 0
    engine.release(tickets[0])
    assert 0 < turns.unserved <= 4 * SLOT, "what the other one waits for"
    engine.release(tickets[1])
    assert not turns.unserved
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert engine.found(chain(8)) == 8 and not turns.unserved


def crowded(
    *blocks: int, room: int = 16, streams: bool = False, twice: bool = False
) -> tuple[DeepRig, FakeEngine, list[int]]:
    """A well with `room` for so many pins, and whose readers are busy: requests for so many blocks come, of which the
    first `streams`, or is asked for `twice`."""
    runs = [chain(each, 100 * n) for n, each in enumerate(blocks)]
    singles = chain(64, 1000)[: 32 * READERS]
    rig = written(8, sum(blocks) + READERS, digests=b"".join(runs) + singles)
    engine = rig.join()
    busy(rig, engine)
    window(rig, READERS + room)
    tickets = []
    for run in runs[:1] * twice + runs:
        tickets.append(engine.ask(run))
        rig.turns()
        if streams and len(tickets) == 1:
            engine.stream(tickets[0])
    return rig, engine, tickets


def pinned(rig: DeepRig, tickets: list[int]) -> list[int]:
    (session,) = rig.hierarchy.registry.sessions.values()
    return [len(session.requests[ticket].pinned) for ticket in tickets]


def all_come(rig: DeepRig, engine: FakeEngine, tickets: list[int]) -> list[int]:
    """How many blocks each gets; those that have all are recalled, in whatever order."""
    got = dict.fromkeys(tickets, 0)
    rig.faulty.release()
    while left := [ticket for ticket, blocks in got.items() if not blocks]:
        rig.settle()
        done = [ticket for ticket in left if engine.answer(ticket).more is False]
        assert done, "the others wait for nothing"
        for ticket in done:
            got[ticket] = len(engine.answer(ticket).refs)
            engine.recalled(engine.recall(ticket))
    rig.settle()
    return list(got.values())


def test_room_for_what_is_not_read_yet_is_given_by_turns() -> None:
    """The last in line lets go of its last blocks for those before it, and is not told to give way."""
    rig, engine, tickets = crowded(16, 3, 2, 16)
    assert pinned(rig, tickets) == [11, 3, 2, 0]
    assert all_come(rig, engine, tickets) == [16, 3, 2, 16]
    assert not engine.scheduler.take(m.GiveWay)
    assert rig.below.reads == READERS + 37, "each block once"


def test_one_that_loses_the_block_that_it_waits_for_comes_to_it_again() -> None:
    rig, engine, tickets = crowded(6, 4, 3, room=6)
    assert pinned(rig, tickets) == [0, 3, 3]
    assert all_come(rig, engine, tickets) == [6, 4, 3]


def test_blocks_that_others_want_too_are_not_let_go() -> None:
    rig, _, tickets = crowded(16, 2, twice=True)
    assert pinned(rig, tickets) == [16, 16, 0]


def test_a_stream_keeps_a_few_whoever_comes() -> None:
    """Else those that stream might wait for each other."""
    rig, _, tickets = crowded(16, 3, 3, 3, 3, 3, streams=True)
    assert pinned(rig, tickets) == [AT_LEAST, 3, 3, 3, 3, 2]


def test_what_gives_way_keeps_its_turn_and_is_told_anew() -> None:
    runs = [chain(8), chain(8, 100), chain(4, 200)]
    rig = written(8, 20, digests=b"".join(runs))
    engine = rig.join()
    window(rig, 12)
    late = engine.ask(runs[0], order=30)
    rig.settle()
    last = engine.ask(runs[1], order=40)
    rig.settle()
    early = engine.ask(runs[2], order=-1)
    rig.settle()
    assert [way.ticket for way in engine.scheduler.take(m.GiveWay)] == [last]
    told = len(engine.answer(last).refs)
    engine.recalled(engine.recall(late))
    rig.settle()
    assert len(engine.answer(last).refs) == told, "nothing is told before it has let go"
    engine.give_way(last)
    rig.settle()
    assert (len(engine.answer(early).refs), engine.answer(early).more) == (4, False)
    assert (len(engine.answer(last).refs), engine.answer(last).more) == (8, False)
    for ticket in (early, last):
        engine.recalled(engine.recall(ticket))
    rig.settle()
    assert not rig.hierarchy.stack.turns.unserved and not rig.stat("pinned_bytes")


def test_who_holds_only_what_others_hold_too_is_not_asked_to_give_way() -> None:
    """It would have the same pins again at once, and be asked again, for ever."""
    runs = [chain(8), chain(4, 200)]
    rig = written(8, 12, digests=b"".join(runs))
    engine = rig.join()
    window(rig, 8)
    offered = engine.ask(runs[0], order=1)
    rig.settle()
    alike = engine.ask(runs[0], order=40)
    rig.settle()
    assert len(engine.answer(alike).refs) == len(engine.answer(offered).refs) == 8
    early = engine.ask(runs[1], order=-1)
    rig.settle()
    assert not engine.scheduler.take(m.GiveWay) and engine.answer(early).reason == "pins"
    engine.release(offered)
    rig.settle()
    assert [way.ticket for way in engine.scheduler.take(m.GiveWay)] == [alike], "now they are its own"


def test_a_run_is_not_told_anew_where_its_client_was_not_asked() -> None:
    rig = written(8, 8)
    engine = rig.join()
    ticket = engine.ask(chain(8))
    rig.settle()
    before = engine.answer(ticket)
    engine.scheduler.say(m.Release(ticket, waits=True))
    rig.settle()
    assert len(engine.answer(ticket).refs) == len(before.refs) == 8


def test_nobody_gives_way_to_a_long_one_that_it_has_passed() -> None:
    rig, engine, tickets = crowded(16, 10)
    rig.faulty.release()
    rig.settle()
    assert pinned(rig, tickets) == [6, 10]
    assert not engine.scheduler.take(m.GiveWay), "it waits for room, and came first"


def test_who_is_being_read_for_is_apart_from_a_line_that_moves() -> None:
    """One of the reads hangs, and all others come."""
    rig = written(8, 18, digests=chain(2) + chain(8, 100) + chain(8, 200))
    engine = rig.join()
    window(rig, 10)
    rig.faulty.faults = HUNG
    hung = engine.ask(chain(2))
    rig.turns()
    rig.faulty.faults = HEALTHY
    rig.clock.advance(MOVES_S)
    tickets = [engine.ask(chain(8, 100)), engine.ask(chain(8, 200))]
    rig.settle()
    (moved,) = engine.scheduler.take(m.LineMoved)
    assert (moved.apart, moved.sharing) == ([hung], 3)
    assert [len(engine.answer(ticket).refs) for ticket in tickets] == [8, 0]
    rig.faulty.release()
    rig.settle()


def test_what_is_copied_says_nothing_of_what_is_to_be_read() -> None:
    rig = written(8, 10 + READERS, digests=chain(8) + chain(2, 100) + chain(64, 1000)[: 32 * READERS])
    engine = rig.join()
    stream = engine.stream(engine.ask(chain(8)))
    rig.settle()
    assert len(engine.landed(stream).refs) == 8
    busy(rig, engine)
    waits = engine.ask(chain(2, 100))
    rig.turns()
    engine.scheduler.take(m.LineMoved)
    rig.clock.advance(MOVES_S)
    engine.copied(stream, 4)
    rig.turns()
    (moved,) = engine.scheduler.take(m.LineMoved)
    assert waits in moved.apart
    rig.faulty.release()
    rig.settle()


def test_those_in_line_hear_that_one_has_all() -> None:
    rig = written(8, 17, digests=chain(8) + chain(9, 100))
    engine = rig.join()
    window(rig, 9)
    first, second = engine.ask(chain(8)), engine.ask(chain(9, 100))
    rig.settle()
    rig.clock.advance(MOVES_S)
    engine.scheduler.take(m.LineMoved)
    engine.recalled(engine.recall(first))
    rig.settle()
    assert [moved.whole for moved in engine.scheduler.take(m.LineMoved)] == [True]
    assert len(engine.answer(second).refs) == 9
