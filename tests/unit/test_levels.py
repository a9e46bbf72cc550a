"""Down to a tier and up again: one promise a test, with sessions played by hand over a tier that can be broken."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, PAYLOAD, PLAIN, TWO, DeepRig, at, chain, fill, told, written

from lab.rig.members import FakeEngine, Model
from stepwell.block.namespace import BlockId
from stepwell.hierarchy import audit
from stepwell.hierarchy.levels.writes import WRITERS
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT, SLOTS
from stepwell.tiers.faulty import TierFaults

READERS = 4  # batches that are read at the same time

# down ----------------------------------------------------------------------------------------------------------------


def test_what_is_published_is_written_through() -> None:
    rig = DeepRig()
    engine, digests = rig.join(TWO), chain(3)
    leases, _ = engine.reserve(digests)
    engine.workers[0].say(m.Filled(leases, []))
    rig.settle()
    assert not rig.below.blocks, "one rank has not written its shard"
    engine.workers[1].say(m.Filled(leases[:2], leases[2:]))
    rig.settle()
    assert set(rig.below.blocks) == {rig.name(engine, at(digests, n)) for n in range(2)}
    assert rig.stat("dict_spilled_blocks") == 2
    assert rig.stat("dict_spilled_bytes") == 4 * SLOT
    assert rig.stat("dict_write_queue_bytes") == rig.stat("leased_blocks") == 0


def test_what_lies_below_is_not_written_again() -> None:
    rig = DeepRig()
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    rig.settle()
    assert engine.spill(digests) == 0
    once = rig.stat("dict_device_written_bytes")
    for entry in list(rig.hierarchy.index.values()):
        rig.hierarchy.arena.drop(entry, "cleared")
    assert engine.spill(digests[:64]) == 2, "computed again, because it could not wait"
    assert engine.found(digests) == 4, "two of them staged"
    assert rig.stat("dict_device_written_bytes") == once


def test_what_is_hit_in_host_memory_counts_as_used_below() -> None:
    """Else the hottest prefix, never read from disk, would be the first to go from there."""
    rig = DeepRig()
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    rig.settle()
    used: list[BlockId] = []
    rig.below.touch = used.append  # type: ignore[method-assign]
    assert engine.found(digests[:96]) == 3
    assert used == [rig.name(engine, at(digests, n)) for n in range(3)]
    used.clear()
    for entry in list(rig.hierarchy.index.values()):
        rig.hierarchy.arena.drop(entry, "cleared")
    assert engine.spill(at(digests, 0)) == 1
    assert used == [rig.name(engine, at(digests, 0))], "computed again, and not written again"


def test_what_an_engine_found_wrong_is_forgotten_below_too() -> None:
    rig = DeepRig()
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    rig.settle()
    assert len(rig.below.blocks) == 4
    engine.scheduler.say(m.Forget(0, at(digests, 2)))
    rig.settle()
    assert engine.found(digests) == 2


def test_the_write_queue_leases_what_it_may_and_keeps_the_rest_in_sight() -> None:
    rig = DeepRig(2, queue_bytes=4 * SLOT)
    rig.faulty.faults = HUNG
    engine, digests = rig.join(), chain(8)
    fill(engine, digests, at_once=1)
    rig.settle()
    assert rig.stat("leased_blocks") == 4
    assert rig.stat("dict_write_queue_bytes") == 8 * SLOT
    fill(engine, chain(12, 100), at_once=1)
    rig.settle()
    assert rig.stat("leased_blocks") == 4
    assert rig.stat("dict_write_queue_bytes") == 16 * SLOT <= rig.hierarchy.limits.host_bytes
    assert rig.stat("dict_skipped_queue_full") == 4
    evicted = rig.stat("dropped_evicted")
    assert evicted >= 4, "they may be evicted before they are written"
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    gone = rig.stat("dict_skipped_gone")
    assert 0 < gone <= evicted
    assert rig.stat("dict_spilled_blocks") == 16 - gone
    assert all(rig.name(engine, at(digests, n)) in rig.below.blocks for n in range(4)), "leased: written for certain"
    assert rig.level.writes.queued_bytes == rig.stat("leased_blocks") == 0


def test_what_waits_to_be_written_stays_as_it_is() -> None:
    rig = DeepRig(1)
    rig.faulty.faults = HUNG
    engine, digests = rig.join(), chain(4)
    fill(engine, digests, word=40)
    engine.spill(chain(SLOTS, 100), word=9)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    again = rig.next_life()
    reader = again.join()
    ticket = reader.ask(digests)
    again.settle()
    assert told(reader, reader.answer(ticket).refs) == [40, 41, 42, 43]


def test_writes_go_out_in_batches_and_few_at_a_time() -> None:
    rig = DeepRig(4)
    rig.faulty.faults = HUNG
    engine = rig.join()
    fill(engine, chain(16), at_once=1)
    assert [len(batch) for batch in rig.level.writes.writing.values()] == [1] * WRITERS
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    sizes = []
    while rig.executor.step():
        rig.turns()
        sizes += [len(batch) for batch in rig.level.writes.writing.values()]
        assert len(rig.level.writes.writing) <= WRITERS
    assert max(sizes) == 4, "8 MiB of blocks in one call"
    rig.settle()
    assert len(rig.below.blocks) == 16


def test_reads_leave_one_writer() -> None:
    rig = written(4, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    engine.ask(chain(4))
    rig.turns()
    assert rig.level.reads.reading
    fill(engine, chain(4, 100), at_once=1)
    assert len(rig.level.writes.writing) == 1
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert len(rig.below.blocks) == 8


@pytest.mark.parametrize(("faults", "reason"), [(TierFaults(fail=1.0), "failed"), (None, "too_large")])
def test_a_block_that_is_not_taken_is_counted_and_let_go(faults: TierFaults | None, reason: str) -> None:
    rig = DeepRig(limit=SLOT)  # a frame is larger than its payload
    rig.faulty.faults = faults or HEALTHY
    engine = rig.join()
    fill(engine, chain(3))
    rig.settle()
    assert rig.stat(f"dict_skipped_{reason}") == 3
    assert rig.stat("dict_spilled_blocks") == rig.stat("leased_blocks") == rig.level.writes.queued_bytes == 0
    assert engine.found(chain(3)) == 3, "the arena has it"


def test_a_block_that_is_forgotten_while_it_waits_is_not_written() -> None:
    rig = DeepRig()
    rig.faulty.faults = HUNG
    engine, digests = rig.join(), chain(WRITERS + 4)
    fill(engine, digests, at_once=1)
    engine.scheduler.say(m.Forget(0, digests))  # one for each writer is being written, the others wait
    rig.settle()
    assert rig.stat("dropped_failed_check") == WRITERS + 4
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert rig.stat("dict_skipped_gone") == 4
    assert rig.stat("leased_blocks") == 0
    assert rig.stat("free_slots") == rig.stat("slabs") * SLOTS
    assert engine.found(digests) == WRITERS, "what was written is whole"


def test_draining_waits_for_the_queue_and_then_lets_the_tier_settle() -> None:
    rig = DeepRig()
    drained: list[int] = []
    rig.hierarchy.drain(lambda: drained.append(len(rig.below.blocks)))
    assert not drained, "never inside the call"
    rig.settle()
    assert drained == [0]
    rig.faulty.faults = HUNG
    fill(rig.join(), chain(6))
    rig.hierarchy.drain(lambda: drained.append(len(rig.below.blocks)))
    rig.settle()
    assert drained == [0]
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert drained == [0, 6]


# up ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [PLAIN, TWO], ids=["one rank", "two ranks"])
def test_evicted_blocks_are_staged_bit_for_bit(model: Model) -> None:
    rig = DeepRig(2)
    engine, digests = rig.join(model), chain(4)
    fill(engine, digests, word=50)
    rig.settle()
    for n in range(4):
        fill(engine, chain(4, 100 * n + 100), word=9)
        rig.settle()
    assert rig.stat("dropped_evicted") >= 4
    assert rig.name(engine, at(digests, 3)) not in rig.hierarchy.index
    ticket = engine.ask(digests + chain(1, 999))
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (4, False, "never_seen")
    assert told(engine, answer.refs) == [50, 51, 52, 53]
    engine.recalled(engine.recall(ticket))
    rig.settle()
    assert rig.stat("hits_staged") == rig.stat("dict_recalled_blocks") > 0
    assert rig.stat("pinned_bytes") == rig.stat("leased_blocks") == 0


def test_a_next_life_finds_what_was_written() -> None:
    rig = written(2, 6)
    assert rig.stat("dict_recovered_blocks") == 6
    engine = rig.join(name="another process")
    ticket = engine.ask(chain(6))
    rig.turns()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).reason) == (0, "staging")
    rig.settle()
    answer = engine.answer(ticket)
    assert (answer.more, answer.reason) == (False, "end")
    assert told(engine, answer.refs) == [100, 101, 102, 103, 104, 105]
    engine.release(ticket)
    rig.settle()
    assert engine.found(chain(6)) == 6
    assert rig.below.reads == 6, "once: they are in the arena now"


def test_many_that_want_the_same_share_one_read() -> None:
    rig = written(3, 6)
    engines = [rig.join(), rig.join(name="another")]
    tickets = [(engine, engine.ask(chain(6))) for _ in range(128) for engine in engines]
    rig.settle()
    assert rig.below.reads == 6
    for engine, ticket in tickets:
        assert told(engine, engine.answer(ticket).refs) == [100 + n for n in range(6)]
        engine.release(ticket)
    rig.settle()
    assert rig.stat("requests") == 256
    assert rig.stat("pinned_bytes") == 0


def test_those_that_hasten_what_hangs_cost_nothing() -> None:
    rig = written(3, 6)
    engine = rig.join()
    rig.faulty.faults = HUNG
    engine.ask(chain(6))
    for _ in range(200):
        again = engine.ask(chain(6))
        rig.turns()
        engine.release(again)
    assert len(rig.level.reads._line) <= 6
    assert len(rig.hierarchy._recalls.waiting._landing) == 1
    rig.faulty.release()


def test_blocks_of_the_arena_and_of_the_tier_make_one_run() -> None:
    rig = written(2, 6)
    engine = rig.join()
    assert engine.spill(at(chain(6), 2), word=102) == 1
    ticket = engine.ask(chain(6))
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == [100 + n for n in range(6)]
    staged = b"".join(f.sources for f in engine._found[ticket])
    assert list(staged) == [1, 1, 0, 1, 1, 1]
    assert rig.below.reads == 5
    assert (rig.stat("hits"), rig.stat("hits_staged")) == (6, 5)


def test_blocks_are_told_as_they_land() -> None:
    told_so_far = 0
    for _ in range(8):  # the first may land last
        rig = written(4, 14)
        engine = rig.join()
        ticket = engine.ask(chain(14))
        rig.turns()
        while rig.executor.step():
            engine.workers[0].map()
            rig.turns()
            audit.hierarchy(rig.hierarchy)
            now = len(engine.answer(ticket).refs)
            assert told(engine, engine.answer(ticket).refs) == [100 + n for n in range(now)]
            told_so_far += now not in (0, 14)
    assert told_so_far, "some came before the others"


# pins ----------------------------------------------------------------------------------------------------------------


def test_what_is_staged_for_a_waiting_request_is_not_evicted() -> None:
    rig = written(1, 4)
    engine = rig.join()
    ticket = engine.ask(chain(2))
    rig.settle()
    refs = engine.answer(ticket).refs
    for n in range(3):
        engine.spill(chain(SLOTS, 100 * n + 100), word=9)
    assert rig.stat("dropped_evicted") > 0
    assert told(engine, refs) == [100, 101]


def test_what_is_being_staged_is_not_evicted_either() -> None:
    rig = written(1, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(2))
    rig.turns()
    rig.faulty.faults = HEALTHY
    for n in range(3):
        engine.spill(chain(SLOTS, 100 * n + 100), word=9)
    rig.faulty.release()
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == [100, 101]


def test_what_was_not_told_is_not_recalled() -> None:
    """It is on its way up: who copied it now would copy what comes to lie there."""
    rig = written(1, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(2))
    rig.turns()
    rig.faulty.faults = HEALTHY
    transfer = engine.recall(ticket)
    rig.turns()
    assert rig.stat("leased_blocks") == 0
    engine.recalled(transfer)
    rig.faulty.release()
    rig.settle()


def test_staging_is_bounded_by_pins() -> None:
    rig = written(3, 14)  # 24 slots, 12 of which may be pinned
    engine, long = rig.join(), chain(14)
    first = engine.ask(long)
    rig.settle()
    assert (len(engine.answer(first).refs), engine.answer(first).reason) == (12, "pins")
    assert rig.below.reads == 12
    second = engine.ask(chain(3, 500) + long)
    third = engine.ask(at(long, 0) + at(long, 13))
    rig.settle()
    assert engine.answer(second).more is False
    assert (len(engine.answer(third).refs), engine.answer(third).reason) == (1, "pins")
    assert rig.below.reads == 12
    engine.release(first)
    rig.settle()
    assert len(engine.answer(third).refs) == 2
    fourth = engine.ask(long)
    rig.settle()
    assert len(engine.answer(fourth).refs) == 11, "one is the third's alone"
    assert rig.stat("pinned_bytes") == 12 * SLOT


def test_a_later_request_is_asked_to_give_way_to_what_an_earlier_one_stages() -> None:
    rig = DeepRig(4)
    runs = [chain(8, 100 * n) for n in range(3)]
    for run in runs:
        fill(rig.join(), run)
    rig.settle()
    rig = rig.next_life(3)
    engine = rig.join()
    late, later = engine.ask(runs[0], order=30), engine.ask(runs[1], order=40)
    rig.settle()
    early = engine.ask(runs[2], order=-1)  # preempted
    rig.settle()
    assert [g.ticket for g in engine.scheduler.take(m.GiveWay)] == [later]
    engine.release(later)
    rig.settle()
    assert [g.ticket for g in engine.scheduler.take(m.GiveWay)] == [late]
    assert len(engine.answer(early).refs) == 4
    engine.release(late)
    rig.settle()
    assert (len(engine.answer(early).refs), engine.answer(early).more) == (8, False)


def test_a_final_answer_comes_once_however_many_things_woke_the_request() -> None:
    """It waits for a block to land and for room, and gets both."""
    rig = written(3, 8)
    engine, digests = rig.join(), chain(8)
    other = engine.ask(digests[: 32 * 4], order=1)
    rig.settle()
    rig.faulty.faults = HUNG
    ticket = engine.ask(digests, order=2)
    rig.turns()
    assert engine.answer(ticket).reason in ("pins", "staging")
    engine.release(other)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    engine.spill(chain(1, 700))
    rig.settle()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (8, False)
    assert rig.stat("requests") == 2, "each once"


def full_of_leases(rig: DeepRig, engine: FakeEngine) -> list[int]:
    """Every slot is being copied from; the transfers."""
    full, transfers = chain(SLOTS, 100), []
    engine.spill(full)
    for n in range(SLOTS):
        ticket = engine.ask(at(full, n))
        rig.settle()
        transfers.append(engine.recall(ticket))
    return transfers


def test_an_arena_full_of_leases_is_waited_for() -> None:
    """It may be full for the length of one copy; a request that waits is not to lose everything for that."""
    rig = written(1, 4)
    engine = rig.join()
    transfers = full_of_leases(rig, engine)
    ticket = engine.ask(chain(2))
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "no_room")
    assert rig.below.reads == 0
    for transfer in transfers[-2:]:  # tails go before heads
        engine.recalled(transfer)
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == [100, 101]
    assert engine.answer(ticket).more is False
    for n in range(2):
        block = rig.hierarchy.index[rig.name(engine, at(chain(2), n))]
        assert block.history.uses == 1, "however often it had to wait"


def test_an_arena_full_of_blocks_being_written_is_waited_for() -> None:
    rig = written(1, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    engine.spill(chain(SLOTS, 100))
    ticket = engine.ask(chain(2))
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "no_room")
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == [100, 101]


def test_an_arena_full_of_what_may_never_end_is_not_waited_for() -> None:
    """Its session is lost and its processes live: time alone frees nothing."""
    rig = written(1, 4)
    zombie, engine = rig.join(name="zombie"), rig.join()
    zombie.reserve(chain(SLOTS, 100))
    ticket = engine.ask(chain(2))
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "no_room")
    zombie.scheduler.leave()
    rig.settle()
    assert rig.stat("quarantined_slots") == SLOTS
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (False, "no_room")


def test_a_request_that_waits_for_two_things_is_woken_by_each() -> None:
    rig = written(3, 3)
    engine, digests = rig.join(), chain(3)
    leases, _ = engine.reserve(at(digests, 1))
    rig.faulty.faults = HUNG
    ticket = engine.ask(digests)
    rig.turns()
    assert engine.answer(ticket).reason == "staging", "which is what takes longer"
    assert rig.hierarchy.arena.pins == 1
    engine.workers[0].say(m.Filled(leases, []))
    rig.turns()
    assert rig.hierarchy.arena.pins == 3, "the run goes on though its first block hangs"
    assert engine.answer(ticket).reason == "staging"
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (3, False)


def test_blocks_that_failed_make_room_and_nobody_is_answered_twice() -> None:
    rig = DeepRig(3)
    late, early, third = chain(11), chain(2, 100), chain(1, 200)
    for run in (late, early, third):
        fill(rig.join(), run)
    rig.settle()
    rig = rig.next_life(3)
    engine = rig.join()
    for n in range(3):
        engine.spill(chain(SLOTS, 1000 * n + 1000))  # all slabs are made: none that comes wakes anybody
    assert engine.found(at(early, 1)) == 1, "in the arena; twelve blocks may be pinned"
    for n in range(11):
        rig.damage(rig.name(engine, at(late, n)), PAYLOAD)
    rig.faulty.faults = HUNG
    first, second = engine.ask(late, order=-1), engine.ask(early, order=1)
    rig.turns()
    last = engine.ask(third, order=9)
    rig.turns()
    assert [engine.answer(t).reason for t in (first, second, last)] == ["staging", "pins", "pins"]
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.executor.drain()
    rig.settle()
    assert [len(engine.answer(t).refs) for t in (first, second, last)] == [0, 2, 1]
    assert [engine.answer(t).more for t in (first, second, last)] == [False] * 3
    assert rig.stat("requests") == 4


# order ---------------------------------------------------------------------------------------------------------------


def busy(rig: DeepRig, engine: FakeEngine) -> int:
    """Every reader hangs on a block of its own; what is asked from now on waits in line."""
    rig.faulty.faults = HUNG
    tickets = [engine.ask(at(chain(64, 1000), n), order=-1000) for n in range(READERS)]
    rig.turns()
    assert len(rig.level.reads.reading) == READERS
    rig.faulty.faults = HEALTHY
    return tickets[0]


def lined_up() -> tuple[DeepRig, FakeEngine, list[bytes]]:
    """A well whose readers are busy, over a tier with three runs of four."""
    runs = [chain(4, 100 * n) for n in range(3)]
    rig = DeepRig(4)
    fill(rig.join(), chain(64, 1000)[: 32 * READERS])
    for run in runs:
        fill(rig.join(), run)
    rig.settle()
    rig = rig.next_life(8)
    engine = rig.join()
    busy(rig, engine)
    return rig, engine, runs


def order_of_reads(rig: DeepRig, engine: FakeEngine, runs: list[bytes]) -> list[tuple[int, int]]:
    """(run, block) of everything that is read once the busy readers go on."""
    places = {rig.name(engine, at(run, n)): (r, n) for r, run in enumerate(runs) for n in range(4)}
    rig.asked.clear()
    rig.faulty.release()
    rig.settle()
    return [places[id] for call in rig.asked for id in call if id in places]


def test_equal_ones_are_read_for_as_they_came_and_then_along_the_prompt() -> None:
    """Whichever engine they are of: the second started later, and its numbers are smaller."""
    rig, engine, runs = lined_up()
    other = rig.join(name="other")
    for one, run, order in ((engine, 0, 40), (other, 1, 2), (engine, 2, 41)):
        one.ask(runs[run], order=order)
        rig.turns()
    assert order_of_reads(rig, engine, runs) == [(r, n) for r in range(3) for n in range(4)]


def test_short_ones_are_read_for_first() -> None:
    rig, engine, runs = lined_up()
    for run, blocks in ((0, 4), (1, 3), (2, 1)):
        engine.ask(runs[run][: 32 * blocks], order=10 + run)
        rig.turns()
    assert order_of_reads(rig, engine, runs) == [(2, 0), (1, 0), (1, 1), (1, 2), *((0, n) for n in range(4))]


def test_what_a_short_one_waits_for_says_nothing_of_a_long_one_that_it_passes() -> None:
    rig, engine, runs = lined_up()
    engine.ask(runs[0])
    rig.turns()
    short, equal = engine.ask(runs[1][:32]), engine.ask(runs[2])
    rig.turns()
    (session,) = rig.hierarchy.registry.sessions.values()
    weighed = [session.requests[ticket].weighed for ticket in (short, equal)]
    passed, behind = [each.question.queued["dict"] for each in weighed if each is not None]
    assert behind - passed == 5 * SLOT


def test_who_is_preempted_hastens_what_others_staged() -> None:
    rig, engine, runs = lined_up()
    engine.ask(runs[0], order=10)
    engine.ask(runs[1], order=20)
    rig.turns()
    engine.ask(runs[1][:64], order=-1)
    engine.ask(runs[0], order=30)  # does not put it off
    rig.turns()
    assert order_of_reads(rig, engine, runs) == [(1, 0), (1, 1), *((0, n) for n in range(4)), (1, 2), (1, 3)]


def test_what_nobody_waits_for_any_more_is_not_read() -> None:
    rig, engine, runs = lined_up()
    free, filling = rig.stat("free_slots"), rig.stat("filling")
    first, second = engine.ask(runs[0], order=1), engine.ask(runs[1], order=2)
    shared = engine.ask(runs[1][:64], order=3)
    rig.turns()
    assert rig.stat("filling") == filling + 8
    engine.release(first)
    assert (rig.stat("filling"), rig.stat("free_slots")) == (filling + 4, free - 4), "at once"
    engine.release(second)
    assert rig.stat("filling") == filling + 2
    audit.hierarchy(rig.hierarchy)
    assert order_of_reads(rig, engine, runs) == [(1, 0), (1, 1)]
    assert len(engine.answer(shared).refs) == 2


def test_what_is_being_read_lands_when_nobody_waits_for_it() -> None:
    rig = written(2, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(4))
    rig.turns()
    engine.release(ticket)
    rig.settle()
    assert (rig.stat("filling"), rig.stat("pinned_bytes")) == (4, 0)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert (rig.stat("filling"), rig.stat("blocks")) == (0, 4)
    assert engine.found(chain(4)) == 4
    assert rig.below.reads == 4


@pytest.mark.parametrize("begun", [True, False])
def test_a_session_that_is_lost_while_blocks_are_staged_for_it(begun: bool) -> None:
    rig, engine, runs = lined_up()
    if begun:
        rig.faulty.faults = HUNG
        rig.faulty.release()
        rig.settle()
    engine.ask(runs[0])
    rig.turns()
    waiting = rig.stat("filling")
    engine.workers[0].leave()
    audit.hierarchy(rig.hierarchy)
    assert rig.stat("pinned_bytes") == 0
    assert rig.stat("filling") == (waiting if begun else READERS)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert (rig.stat("filling"), rig.stat("quarantined_slots"), len(rig.level.reads.promoting)) == (0, 0, 0)
    assert rig.join(name="next").found(runs[0]) == 4


def test_a_tier_is_asked_for_little_until_it_is_known_and_for_no_more_than_it_brings_soon() -> None:
    rig = written(16, 48)
    engine, level = rig.join(), rig.level
    level.reads._ended = 0
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(48))
    rig.turns()
    assert sum(map(len, level.reads.reading.values())) == 1, "as much as the least batch has"
    level.reads._ended = 1
    level.pump()
    assert sum(map(len, level.reads.reading.values())) == 2
    for _ in range(8):
        rig.level.reads.speed.read(SLOT, SLOT / (100 * SLOT), 1.0)  # ten blocks in a tenth of a second
    level.pump()
    assert 8 <= sum(map(len, level.reads.reading.values())) <= 12
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert len(engine.answer(ticket).refs) == 48


def test_a_tier_is_asked_for_a_block_however_slow_it_is() -> None:
    rig = written(4, 4)
    engine = rig.join()
    for _ in range(16):
        rig.level.reads.speed.read(4096, 1e5, 1.0)
    assert rig.level.reads.in_flight < 2
    ticket = engine.ask(chain(4), recall="always")
    rig.settle()
    assert len(engine.answer(ticket).refs) == 4
