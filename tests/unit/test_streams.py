"""Streamed recalls in the well: blocks are leased as they land and let go as they are copied, whatever happens in the
middle; with sessions played by hand."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, TWO, DeepRig, at, chain, fill, told, written

from lab.rig.members import PLACES, FakeEngine, Rig, write
from stepwell import events as e
from stepwell.hierarchy import dispatch
from stepwell.hierarchy.core import Options
from stepwell.hierarchy.levels.breaker import Verdict
from stepwell.hierarchy.requests import answers
from stepwell.hierarchy.saved import PauseRecord
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT, SLOTS
from stepwell.testing.remote_tier import Store

SLAB_PINS = SLOTS // 2
"""Blocks that may be pinned in a host tier of one slab."""


def window(rig: Rig, blocks: int) -> None:
    """So many blocks may be pinned."""
    rig.hierarchy.follow(Options(pin_waiting=blocks * SLOT / rig.hierarchy.limits.host_bytes))


def asked(engine: FakeEngine, digests: bytes, *, order: int | None = None) -> int:
    """The ticket of a question of which all is known, and nothing is read yet."""
    faulty = engine.rig.tiers[0]
    faulty.faults = HUNG  # type: ignore[attr-defined]
    ticket = engine.ask(digests, order=order)
    engine.rig.settle()
    return ticket


def heal(rig: DeepRig) -> None:
    rig.faulty.faults = HEALTHY
    rig.faulty.release()


def said(engine: FakeEngine, ticket: int) -> tuple[int, str]:
    """The last that the well said of how far a run reaches, and why no farther."""
    last = [found for found in engine.scheduler.take(m.Found) if found.ticket == ticket][-1]
    return last.known, last.ends


def through(engine: FakeEngine, transfer: int, words: list[int]) -> bool:
    """What has landed of a stream is copied by all ranks, behind these words. False: nothing has."""
    engine.rig.settle()
    refs = engine.landed(transfer).refs[len(words) :]
    words += told(engine, refs)
    engine.copied(transfer, len(words))
    return len(refs) > 0


def whole(engine: FakeEngine, transfer: int) -> list[int]:
    """The words of all of a stream, each copied as it has landed."""
    words: list[int] = []
    while through(engine, transfer, words):
        pass
    for rank in range(1, len(engine.workers)):
        assert len(engine.landed(transfer, rank).refs) == len(words)
    engine.recalled(transfer)
    engine.rig.settle()
    return words


def nothing_held(rig: Rig) -> bool:
    stats = rig.hierarchy.stats()
    return stats["pinned_bytes"] == stats["leased_blocks"] == stats["filling"] == stats["quarantined_slots"] == 0


# as it should be ------------------------------------------------------------------------------------------------------


def test_blocks_go_to_all_ranks_in_their_order_and_their_leases_end_with_the_slowest() -> None:
    rig = written(2, 6)
    engine = rig.join()
    ticket = asked(engine, chain(6))
    assert said(engine, ticket) == (6, "end")
    transfer = engine.stream(ticket)
    rig.settle()
    assert len(engine.landed(transfer).refs) == 0
    heal(rig)
    rig.settle()
    answer = engine.landed(transfer)
    assert told(engine, answer.refs) == [100, 101, 102, 103, 104, 105]
    assert (answer.more, answer.reason) == (False, "end")
    for copied in (2, 1, 5):  # it has not un-copied any
        engine.copied(transfer, copied)
        rig.settle()
        assert rig.stat("leased_blocks") == 6 - max(2, copied)
        assert rig.stat("pinned_bytes") == (6 - max(2, copied)) * SLOT
    engine.recalled(transfer)
    rig.settle()
    assert nothing_held(rig) and rig.stat("recalled_blocks") == 5


def two_ranks(slabs: int = 4, blocks: int = 6) -> tuple[DeepRig, FakeEngine]:
    """An engine of two ranks over a tier with its blocks."""
    first = DeepRig(slabs)
    fill(first.join(TWO), chain(blocks))
    first.settle()
    rig = first.next_life(slabs)
    return rig, rig.join(TWO)


def test_a_lease_ends_when_the_slowest_rank_has_copied() -> None:
    rig, engine = two_ranks()
    transfer = engine.stream(asked(engine, chain(6)))
    heal(rig)
    rig.settle()
    engine.copied(transfer, 6, 0)
    rig.settle()
    assert rig.stat("leased_blocks") == 6
    engine.copied(transfer, 2, 1)
    rig.settle()
    assert rig.stat("leased_blocks") == 4
    assert told(engine, engine.landed(transfer, 1).refs[2:]) == [102, 103, 104, 105]
    engine.workers[0].say(m.Recalled([transfer]))
    rig.settle()
    assert rig.stat("leased_blocks") == 4, "the other one copies still"
    engine.workers[1].say(m.Recalled([transfer]))
    rig.settle()
    assert nothing_held(rig)


@pytest.mark.parametrize("slots", [1, 2, SLAB_PINS])
def test_a_run_that_is_larger_than_host_memory_goes_through(slots: int) -> None:
    rig = written(1, 3 * SLOTS)
    engine = rig.join()
    window(rig, slots)
    transfer = engine.stream(asked(engine, chain(3 * SLOTS)))
    heal(rig)
    assert whole(engine, transfer) == list(range(100, 100 + 3 * SLOTS))
    assert nothing_held(rig)
    assert rig.stat("recalled_blocks") == 3 * SLOTS


def test_a_run_that_may_be_pinned_and_has_no_slots_goes_through() -> None:
    """Its last block that was copied makes way, though the next one is its child."""
    rig = written(1, 3 * SLOTS)
    engine = rig.join()
    window(rig, 4 * SLOTS)
    transfer = engine.stream(asked(engine, chain(3 * SLOTS)))
    heal(rig)
    assert whole(engine, transfer) == list(range(100, 100 + 3 * SLOTS))
    assert nothing_held(rig)


@pytest.mark.parametrize("slots", [1, 2])
def test_two_streams_go_through_a_small_window(slots: int) -> None:
    rig = written(1, 16)
    one, two = rig.join(), rig.join(name="two")
    digests = chain(16)
    window(rig, slots)
    first, second = one.stream(asked(one, digests, order=1)), two.stream(asked(two, digests, order=2))
    heal(rig)
    words: dict[FakeEngine, list[int]] = {one: [], two: []}
    while through(one, first, words[one]) or through(two, second, words[two]):
        pass
    assert words[one] == words[two] == list(range(100, 116))
    assert (one.landed(first).reason, two.landed(second).reason) == ("end", "end")
    one.recalled(first)
    two.recalled(second)
    rig.settle()
    assert nothing_held(rig)


@pytest.mark.parametrize("session", ["the same", "another"])
def test_a_stream_that_nobody_copies_keeps_no_earlier_one_from_going_on(session: str) -> None:
    """An engine copies a few at a time, or has stopped: what it holds meanwhile is all that may be pinned."""
    rig = written(1, 16)
    one, digests = rig.join(), chain(16)
    two = one if session == "the same" else rig.join(name="two")
    window(rig, 2)
    first = one.stream(asked(one, digests, order=1))
    second = two.stream(asked(two, digests, order=2))
    heal(rig)
    assert whole(one, first) == list(range(100, 116))
    assert rig.stat("pinned_bytes") <= 2 * SLOT, "it has not followed the first one through all of it"
    assert whole(two, second) == list(range(100, 116))
    assert nothing_held(rig)


def test_an_engine_takes_less_than_was_offered() -> None:
    """No more blocks than it has pages for come to its workers."""
    rig = written(2, 6)
    engine = rig.join()
    transfer = engine.stream(asked(engine, chain(6)), 1, 3)
    rig.settle()
    assert rig.stat("pinned_bytes") == 4 * SLOT
    heal(rig)
    assert whole(engine, transfer) == [101, 102, 103]
    assert engine.landed(transfer).reason == "end" and nothing_held(rig)


def test_blocks_that_an_engine_has_already_fill_no_window() -> None:
    rig = written(2, 8)
    engine = rig.join()
    window(rig, 5)
    other = rig.join(name="other").ask(chain(1))
    ticket = engine.ask(chain(8))
    rig.settle()
    assert len(engine.answer(ticket).refs) == 5 and engine.answer(ticket).reason == "pins"
    assert whole(engine, engine.stream(ticket, 6)) == [106, 107]
    del other


def test_a_rank_that_has_copied_nothing_ends_no_pins() -> None:
    """Nor those of blocks that come before the stream's first, which are still to land."""
    rig = written(2, 6)
    engine = rig.join()
    transfer = engine.stream(asked(engine, chain(6)), 3)
    for blocks in (-1, 0, 5):
        engine.copied(transfer, blocks)
    rig.settle()
    assert rig.stat("pinned_bytes") == 6 * SLOT
    heal(rig)
    assert whole(engine, transfer) == [103, 104, 105]
    assert nothing_held(rig)


def test_an_engine_takes_less_of_what_has_landed() -> None:
    rig = written(2, 6)
    engine = rig.join()
    ticket = engine.ask(chain(6))
    rig.settle()
    transfer = engine.stream(ticket, 1, 3)
    assert whole(engine, transfer) == [101, 102, 103]
    assert nothing_held(rig)


def test_a_long_run_is_told_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of all would keep the well from everything else, and may be longer than a message may be."""
    monkeypatch.setattr(answers, "SLICE", 4)
    rig = DeepRig(4)
    engine, digests = rig.join(), chain(14)
    fill(engine, digests)
    rig.settle()
    ticket = engine.ask(digests)
    rig.settle()
    engine.answer(ticket)
    transfer = engine.stream(ticket)
    rig.settle()
    assert [len(landed.slots) // 16 for landed in engine.workers[0].inbox if isinstance(landed, m.Landed)] == [
        4,
        4,
        4,
        2,
    ]
    assert whole(engine, transfer) == list(range(100, 114))


def test_a_block_that_was_found_and_is_streamed_is_used_once() -> None:
    rig = DeepRig(4)
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    rig.settle()
    uses = {entry.history.id: entry.history.uses for entry in rig.hierarchy.index.values()}
    ticket = engine.ask(digests)
    rig.settle()
    whole(engine, engine.stream(ticket))
    assert {
        entry.history.id: entry.history.uses - uses[entry.history.id] for entry in rig.hierarchy.index.values()
    } == (dict.fromkeys(uses, 1))


def test_streams_take_no_places_of_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client bounds what it asks, and knows of no stream that it would be too many with."""
    monkeypatch.setattr(dispatch, "MAX_REQUESTS", 4)
    rig = written(2, 6)
    engine = rig.join()
    streams = [engine.stream(asked(engine, chain(6))) for _ in range(4)]
    tickets = [engine.ask(chain(6)) for _ in range(4)]
    heal(rig)
    rig.settle()
    assert engine.live and all(len(engine.answer(ticket).refs) == 6 for ticket in tickets)
    engine.ask(chain(6))
    assert not engine.live
    del streams


# known ----------------------------------------------------------------------------------------------------------------


def test_what_is_known_of_a_run() -> None:
    rig = DeepRig(2)
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    rig.settle()
    ticket = engine.ask(digests + chain(1, 99))
    rig.settle()
    assert said(engine, ticket) == (6, "never_seen"), "all in host memory"
    for entry in [entry for n, entry in enumerate(rig.hierarchy.index.values()) if n >= 3]:
        rig.hierarchy.arena.drop(entry, "cleared")
    assert said(engine, asked(engine, digests)) == (6, "end"), "a part in a tier"
    rig.hierarchy.stack.drop(rig.name(engine, at(digests, 4)))
    rig.settle()


def test_a_gap_ends_what_is_known() -> None:
    rig = written(2, 6)
    engine, digests = rig.join(), chain(6)
    rig.hierarchy.stack.drop(rig.name(engine, at(digests, 4)))
    assert said(engine, asked(engine, digests)) == (4, "never_seen")


def test_of_a_tier_that_is_down_nothing_is_known() -> None:
    rig = written(2, 6)
    engine, digests = rig.join(), chain(6)
    break_reads(rig)
    assert said(engine, asked(engine, digests)) == (0, "tier_down")


def test_what_others_have_written_is_known_when_their_tier_has_answered() -> None:
    store: Store = {}
    first = DeepRig(4, store=store)
    fill(first.join(), chain(12))
    first.settle()
    rig = DeepRig(1, keyring=first.keyring, store=store)
    engine = rig.join()
    ticket = engine.ask(chain(12))
    rig.turns()
    assert {found.ends for found in engine.scheduler.take(m.Found)} == {""}, "it has not answered"
    rig.settle()
    assert said(engine, ticket) == (12, "end")
    assert whole(engine, engine.stream(ticket)) == list(range(100, 112))


def test_a_window_that_is_full_hides_nothing_that_others_have_written() -> None:
    """A shared tier is asked before it is said how far a run reaches, even where its end cannot be pinned yet."""
    store: Store = {}
    first = DeepRig(4, store=store)
    fill(first.join(), chain(12))
    first.settle()
    rig = first.next_life(1, store=store)
    engine = rig.join()
    for n in range(8, 12):
        del rig.below.blocks[rig.name(engine, at(chain(12), n))]
    ticket = known_at_last(engine, chain(12))
    transfer = engine.stream(ticket, 0, said(engine, ticket)[0])
    assert whole(engine, transfer) == list(range(100, 112))


def known_at_last(engine: FakeEngine, digests: bytes) -> int:
    """The ticket of a question, as soon as the well says that all is known of it."""
    ticket = engine.ask(digests)
    for _ in range(1000):
        if any(found.ends for found in engine.scheduler.inbox if isinstance(found, m.Found)):
            return ticket
        if not engine.rig.hierarchy.turn():
            engine.rig.executor.step()
    raise AssertionError("it is never known")


# in the middle --------------------------------------------------------------------------------------------------------


def break_reads(rig: DeepRig) -> None:
    """The tier is down."""
    breaker = rig.level._reads_breaker
    for number in range(100):
        breaker.began(-number)
        breaker.ended(-number, Verdict.FAILED)
        if rig.level.down:
            return
    raise AssertionError("it never is down")


def middle(slabs: int = 1, blocks: int = 12) -> tuple[DeepRig, FakeEngine, int]:
    """A stream of which the first half of a window has been copied, and which waits for the tier."""
    rig = written(slabs, blocks)
    engine = rig.join()
    window(rig, SLAB_PINS)
    transfer = engine.stream(asked(engine, chain(blocks)))
    heal(rig)
    rig.settle()
    assert len(engine.landed(transfer).refs) == SLAB_PINS
    rig.faulty.faults = HUNG
    engine.copied(transfer, 2)
    rig.settle()
    assert len(engine.landed(transfer).refs) == SLAB_PINS and engine.landed(transfer).more
    assert rig.stat("leased_blocks") == 2 and rig.stat("filling") == 2
    return rig, engine, transfer


def test_a_rank_that_gives_up_cuts_the_run_for_the_others() -> None:
    rig, engine = two_ranks(blocks=8)
    window(rig, 4)
    transfer = engine.stream(asked(engine, chain(8)))
    heal(rig)
    rig.settle()
    assert len(engine.landed(transfer).refs) == 2
    engine.copied(transfer, 2, 0)
    engine.workers[0].say(m.Recalled([transfer]))
    rig.settle()
    answer = engine.landed(transfer, 1)
    assert (len(answer.refs), answer.more, answer.reason) == (2, False, "gave_way")
    engine.workers[1].say(m.Recalled([transfer]))
    rig.settle()
    assert nothing_held(rig)


def test_a_rank_that_had_given_up_before_the_well_knew_of_the_stream() -> None:
    rig, engine = two_ranks()
    ticket = asked(engine, chain(6))
    transfer = engine.number()
    engine.workers[0].say(m.Recalled([transfer]))
    engine.scheduler.say(m.Recall(ticket, transfer, 0, 6, streamed=True))
    rig.settle()
    assert (engine.landed(transfer, 1).more, engine.landed(transfer, 1).reason) == (False, "gave_way")
    engine.workers[1].say(m.Recalled([transfer]))
    heal(rig)
    rig.settle()
    assert nothing_held(rig)


def test_all_ranks_had_given_up_before_the_well_knew_of_the_stream() -> None:
    rig, engine = two_ranks()
    ticket = asked(engine, chain(6))
    transfer = engine.number()
    engine.recalled(transfer)
    engine.scheduler.say(m.Recall(ticket, transfer, 0, 6, streamed=True))
    heal(rig)
    rig.settle()
    assert nothing_held(rig) and not rig.hierarchy.registry.sessions[engine.session].requests


def test_a_request_that_is_unknown_is_no_stream() -> None:
    rig = written(2, 2)
    engine = rig.join()
    transfer = engine.stream(77)
    rig.settle()
    assert (engine.landed(transfer).more, engine.landed(transfer).reason) == (False, "gave_way")


def test_a_stream_that_is_released_ends_and_lets_go_of_what_was_copied() -> None:
    rig, engine, transfer = middle()
    decided: list[e.Event] = []
    sink, rig.hierarchy._sink = rig.hierarchy._sink, lambda event: (decided.append(event), sink(event))[1]
    (ticket,) = rig.hierarchy.registry.sessions[engine.session].requests
    engine.release(ticket)
    rig.settle()
    assert (engine.landed(transfer).more, engine.landed(transfer).reason) == (False, "gave_way")
    assert rig.stat("leased_blocks") == 2 and not rig.stat("pinned_bytes")
    engine.scheduler.say(m.Ask(ticket, 0, 1, chain(1, 500)))  # nobody does so, and it is no one else's
    engine.copied(transfer, 3)
    rig.settle()
    assert rig.stat("leased_blocks") == 1
    engine.recalled(transfer)
    heal(rig)
    rig.settle()
    assert nothing_held(rig)
    assert list(rig.hierarchy.registry.sessions[engine.session].requests) == [ticket]
    assert sum(isinstance(event, e.RecallEnded) for event in decided) == 1
    (recalled,) = [event for event in decided if isinstance(event, e.BlocksRecalled)]
    assert (recalled.blocks, recalled.nbytes) == (3, 3 * SLOT)


def test_who_waits_for_slots_hears_that_a_released_stream_has_let_go_of_some() -> None:
    rig, engine, transfer = middle()
    (ticket,) = rig.hierarchy.registry.sessions[engine.session].requests
    engine.release(ticket)
    rig.settle()
    rig.hierarchy._core.news.take()
    engine.copied(transfer, 3)
    assert rig.hierarchy._core.news.freed


def test_a_rank_that_ends_a_released_stream_ends_it_once() -> None:
    rig, engine = two_ranks()
    ticket = asked(engine, chain(6))
    transfer = engine.stream(ticket)
    engine.release(ticket)
    engine.workers[0].say(m.Recalled([transfer]))
    heal(rig)
    rig.settle()
    engine.workers[1].say(m.Recalled([transfer]))
    rig.settle()
    assert nothing_held(rig)


def test_a_pause_ends_a_stream_with_what_has_landed() -> None:
    rig, engine, transfer = middle()
    rig.hierarchy.operator.pause(PauseRecord("recalls", 0.0, 0, "test"))
    rig.settle()
    assert (len(engine.landed(transfer).refs), engine.landed(transfer).reason) == (SLAB_PINS, "paused")
    engine.recalled(transfer)
    heal(rig)
    rig.settle()
    assert nothing_held(rig)


def test_a_tier_that_goes_down_ends_a_stream() -> None:
    rig, engine, transfer = middle()
    break_reads(rig)
    rig.settle()
    assert (len(engine.landed(transfer).refs), engine.landed(transfer).reason) == (SLAB_PINS, "tier_down")
    engine.recalled(transfer)
    heal(rig)
    rig.settle()
    assert nothing_held(rig)


def test_a_quarantined_namespace_ends_a_stream() -> None:
    rig, engine, transfer = middle()
    session = rig.hierarchy.registry.sessions[engine.session]
    rig.hierarchy.canaries._tags = frozenset(origin.tag for origin in session.origins(0))
    heal(rig)
    rig.settle()
    assert (len(engine.landed(transfer).refs), engine.landed(transfer).reason) == (SLAB_PINS, "quarantined")
    engine.recalled(transfer)
    rig.settle()
    assert nothing_held(rig)


def test_a_block_that_cannot_be_read_ends_a_stream_there() -> None:
    rig, engine, transfer = middle()
    rig.damage(rig.name(engine, at(chain(12), 7)), 5000)
    heal(rig)
    words: list[int] = [100, 101]
    while through(engine, transfer, words):
        pass
    assert words == list(range(100, 107))
    assert (engine.landed(transfer).more, engine.landed(transfer).reason) == (False, "not_readable")
    engine.recalled(transfer)
    rig.settle()
    assert nothing_held(rig)


@pytest.mark.parametrize("fills", [True, False])
def test_a_stream_waits_for_what_another_session_fills(fills: bool) -> None:
    """It was known, and is promised: it is there again in a moment, or read."""
    rig, engine, transfer = middle(2)
    heal(rig)
    other = rig.join(name="other")
    (lease,), refs = other.reserve(at(chain(12), 9))
    words = [100, 101]
    while through(engine, transfer, words):
        pass
    assert words == list(range(100, 109)) and engine.landed(transfer).more
    for place in range(len(PLACES)):
        write(other.workers[0].slot(refs[0][0]), place, 109)
    other.workers[0].say(m.Filled([lease], []) if fills else m.Filled([], [lease]))
    while through(engine, transfer, words):
        pass
    assert words == list(range(100, 112))
    engine.recalled(transfer)
    rig.settle()
    assert nothing_held(rig)


@pytest.mark.parametrize("acknowledges", [False, True])
def test_a_session_that_ends_in_the_middle_leaves_its_leases_to_who_may_still_copy(acknowledges: bool) -> None:
    rig, engine, transfer = middle()
    session, refs = engine.session, engine.landed(transfer).refs[2:]
    engine.scheduler.leave()
    heal(rig)
    rig.settle()
    assert rig.stat("leased_blocks") == 2 and not rig.stat("pinned_bytes")
    other = rig.join(name="other")
    for start in (200, 300):
        other.spill(chain(4, start), word=9)
    assert told(engine, refs) == [102, 103], "nobody has their slots"
    if acknowledges:
        FakeEngine(rig, name="engine", acknowledges=[session])
    else:
        engine.workers[0].exit()
    rig.settle()
    assert nothing_held(rig)


def test_those_beside_a_stream_hear_that_it_gets_on() -> None:
    """One that asks, and one that streams: they wait for the room that it has, as it does itself."""
    rig = DeepRig(2)
    engine, other, digests = rig.join(), rig.join(name="other"), chain(8)
    fill(engine, digests + chain(3, 50))
    rig.settle()
    window(rig, 4)
    first = engine.stream(engine.ask(digests, order=1))
    rig.settle()
    assert len(engine.landed(first).refs) == 4
    tickets = [other.ask(chain(3, 50), order=order) for order in (2, 3)]
    rig.settle()
    other.stream(tickets[1])
    rig.settle()
    rig.clock.advance(answers.MOVES_S)
    for member in (*engine.members, *other.members):
        member.take(m.LineMoved)
    engine.copied(first, 1)
    rig.turns()
    for member in (*engine.members, *other.members):
        assert member.take(m.LineMoved) == [m.LineMoved([], 3)]
    engine.copied(first, 2)
    rig.turns()
    assert not any(member.take(m.LineMoved) for member in other.members), "they have just been told"
