"""When blocks are written to the tier below: each policy in a well, over a tier that can be broken."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, TWO, DeepRig, at, chain, fill, told
from hypothesis import given
from hypothesis import strategies as st

from lab.rig.members import FakeEngine, Model
from stepwell.hierarchy.arena.slab_pool import MAX_NEXT
from stepwell.hierarchy.levels.writer import MAX_BEFORE
from stepwell.hierarchy.work import TURN_BLOCKS
from stepwell.policies.writing.back import SHARE, Back
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.policies.writing.second_touch import SecondTouchWriting
from stepwell.policies.writing.through import Through
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOT, SLOTS
from stepwell.tiers.faulty import TierFaults

TARGET = -(-2 * SLAB // SHARE // SLOT)  # blocks that `back` keeps clean or free, of an arena of two slabs


def below(rig: DeepRig, engine: FakeEngine, digests: bytes) -> list[int]:
    """Which of the blocks lie in the tier."""
    return [n for n in range(len(digests) // 32) if rig.name(engine, at(digests, n)) in rig.below.blocks]


def drain(rig: DeepRig) -> bool:
    """As the well ends: the engines have gone."""
    for member in rig.members:
        member.exit()
    drained: list[bool] = []
    rig.hierarchy.drain(lambda: drained.append(True))
    rig.settle()
    return bool(drained)


@given(uses=st.integers(1, 1000), host=st.integers(0, 1 << 50))
def test_each_policy_has_one_occasion(uses: int, host: int) -> None:
    occasions = {
        name: (policy.at_spill(uses), policy.at_use(), policy.ahead(host) > 0)
        for name, policy in ((name, make()) for name, make in WRITE_POLICIES.items())
    }
    again = uses > 1
    assert occasions == {
        "through": (True, False, False),
        "second_touch": (again, True, False),
        "back": (False, False, host >= SHARE),
    }
    assert Back().ahead(host) * SHARE <= host


# second_touch ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_written_with_its_prefix_queues_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DeepRig(3, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(8)
    leases, _ = engine.reserve(digests)
    engine.scheduler.say(m.Abandon(leases))  # it has been used once
    added: list[object] = []
    add = rig.level.writes.add
    monkeypatch.setattr(rig.level.writes, "add", lambda entry: (added.append(entry), add(entry)))
    fill(engine, digests, at_once=8)
    rig.settle()
    assert below(rig, engine, digests) == list(range(8)) and len(added) == 8


@pytest.mark.parametrize("model", [Model(), TWO], ids=["one rank", "two ranks"])
def test_what_is_asked_for_twice_is_written_and_nothing_else(model: Model) -> None:
    rig = DeepRig(3, write=SecondTouchWriting())
    engine, digests = rig.join(model), chain(6)
    fill(engine, digests)
    fill(engine, chain(4, 100))
    rig.settle()
    assert not rig.below.blocks
    assert engine.found(digests[:96]) == 3
    assert below(rig, engine, digests) == [0, 1, 2]
    assert engine.found(digests[:96]) == 3
    assert rig.stat("dict_spilled_blocks") == 3, "once"
    assert drain(rig)
    again = rig.next_life(3)
    reader = again.join(model)
    assert [reader.found(digests), reader.found(chain(4, 100))] == [3, 0]


def test_what_waits_to_be_written_is_not_queued_again() -> None:
    rig = DeepRig(write=SecondTouchWriting())
    rig.faulty.faults = HUNG
    engine, digests = rig.join(), chain(6)
    fill(engine, digests)
    for _ in range(3):
        assert engine.found(digests) == 6
    rig.level.write(list(rig.hierarchy.index.values()))
    assert rig.stat("dict_write_queue_bytes") == 6 * SLOT
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert rig.stat("dict_spilled_blocks") == 6
    assert rig.stat("leased_blocks") == rig.level.writes.queued_bytes == 0


def test_what_was_forgotten_and_comes_again_was_asked_for_twice() -> None:
    """Else a cycle that is larger than host memory would never reach the disk."""
    rig = DeepRig(2, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    for n in range(4):
        fill(engine, chain(4, 100 * n + 100))
    rig.settle()
    assert rig.name(engine, at(digests, 3)) not in rig.hierarchy.index
    assert not rig.below.blocks
    kept = engine.found(digests)
    assert below(rig, engine, digests) == list(range(kept))
    parent = at(digests, kept - 1) if kept else b""
    fill(engine, digests[32 * kept :], parent=parent)
    rig.settle()
    assert below(rig, engine, digests) == [0, 1, 2, 3]


def test_what_is_written_brings_what_is_before_it() -> None:
    """Its request knew the blocks before it and was not told of them: they were not worth recalling, say."""
    rig = DeepRig(3, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(8)
    fill(engine, digests)
    last = rig.hierarchy.index[rig.name(engine, at(digests, 7))]
    rig.hierarchy.arena.drop(last, "evicted")
    fill(engine, at(digests, 7), parent=at(digests, 6))
    rig.settle()
    assert below(rig, engine, digests) == list(range(8))


def test_only_so_many_blocks_are_brought_along() -> None:
    """More of them come with the next use."""
    blocks = MAX_BEFORE + 8
    rig = DeepRig(2 * blocks // SLOTS + 2, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(blocks)
    fill(engine, digests)
    rig.hierarchy.arena.drop(rig.hierarchy.index[rig.name(engine, at(digests, blocks - 1))], "evicted")
    fill(engine, at(digests, blocks - 1), parent=at(digests, blocks - 2))
    rig.settle()
    assert below(rig, engine, digests) == list(range(blocks - 1 - MAX_BEFORE, blocks))
    assert engine.found(digests) == blocks
    assert below(rig, engine, digests) == list(range(blocks))


def test_what_came_up_is_not_written_behind_a_clear() -> None:
    """The clear has been through host memory when a block lands there, and it is asked for before the tier is clear."""
    rig = DeepRig(3, write=SecondTouchWriting())
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    assert engine.found(digests) == 3
    rig.hierarchy.operator.clear(frozenset({"host"}), b"", lambda sums: None)
    rig.settle()
    assert below(rig, engine, digests) == [0, 1, 2]
    ticket = engine.ask(digests)
    rig.settle()
    entries = [rig.hierarchy.index[rig.name(engine, at(digests, n))] for n in range(3)]
    rig.below.clear(lambda forgotten: None)
    rig.hierarchy.migration.used(entries, entries)
    engine.release(ticket)
    rig.settle()
    assert not rig.below.blocks


def test_through_writes_nothing_but_what_was_spilled() -> None:
    rig = DeepRig(3, write=Through())
    rig.faulty.faults = TierFaults(fail=1.0)
    engine, digests = rig.join(), chain(4)
    fill(engine, digests[:64])
    rig.settle()
    rig.clock.advance(2.0)
    rig.faulty.faults = HEALTHY
    fill(engine, digests[64:], parent=at(digests, 1))
    assert engine.found(digests) == 4
    assert below(rig, engine, digests) == [2, 3]


# back -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Model(), TWO], ids=["one rank", "two ranks"])
def test_nothing_is_written_while_there_is_room_and_all_at_the_end(model: Model) -> None:
    rig = DeepRig(4, write=Back())
    engine, digests, other = rig.join(model), chain(5), chain(3, 100)
    fill(engine, digests, word=40)
    fill(engine, other, word=60)
    assert engine.found(digests) == 5
    assert not rig.below.blocks
    assert drain(rig)
    assert len(rig.below.blocks) == 8
    again = rig.next_life(4)
    reader = again.join(model)
    tickets = [reader.ask(digests), reader.ask(other)]
    again.settle()
    words = [told(reader, reader.answer(ticket).refs) for ticket in tickets]
    assert words == [[40, 41, 42, 43, 44], [60, 61, 62]]


def test_what_goes_next_is_written_before_it_goes_and_its_prefix_with_it() -> None:
    rig = DeepRig(2, write=Back())
    engine = rig.join()
    chains = [chain(4, 100 * n) for n in range(4)]
    for each in chains[:3]:
        fill(engine, each)
    rig.settle()
    assert not rig.below.blocks, "there is room for four more"
    fill(engine, chains[3])
    rig.settle()
    assert [len(below(rig, engine, each)) for each in chains] == [4] * TARGET + [0] * (4 - TARGET), "the oldest tails"
    for n in range(4, 12):
        fill(engine, chain(TARGET - 1, 100 * n))  # no more at a time than is kept clean
        rig.settle()
    assert rig.stat("dropped_evicted") == 16
    assert rig.stat("dict_skipped_gone") == 0
    assert [engine.found(each) for each in chains] == [4, 4, 4, 4]
    assert rig.stat("hits_staged") == 16


def test_what_goes_before_it_could_be_written_is_counted() -> None:
    rig = DeepRig(2, write=Back(), queue_bytes=2 * SLOT)
    rig.faulty.faults = HUNG
    engine = rig.join()
    for n in range(8):
        fill(engine, chain(4, 100 * n), at_once=1)
    rig.settle()
    evicted = rig.stat("dropped_evicted")
    assert evicted == 16
    assert rig.stat("leased_blocks") <= 2 + 4, "what waits, and what is being written"
    assert rig.stat("dict_write_queue_bytes") <= rig.hierarchy.limits.host_bytes
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert rig.stat("dict_skipped_gone") == evicted
    assert rig.stat("leased_blocks") == rig.level.writes.queued_bytes == 0


def test_what_is_below_or_cleared_is_not_lost_when_it_goes() -> None:
    rig = DeepRig(2, write=Back())
    engine = rig.join()
    fill(engine, chain(8))
    rig.hierarchy.operator.clear(frozenset({"host"}), b"", lambda sums: None)
    rig.settle()
    assert rig.stat("dropped_cleared") == 8
    assert rig.stat("dict_skipped_gone") == 0
    assert not rig.below.blocks, "what an operator has cleared from host memory is written nowhere"


def test_a_tier_that_is_too_small_is_not_written_again_and_again() -> None:
    rig = DeepRig(2, write=Back(), limit=3 * SLOT)
    engine = rig.join()
    for n in range(16):
        fill(engine, chain(1, 100 * n))
    rig.settle()
    for n in range(3):
        assert engine.found(chain(1, 100 * n + 1300)) == 1
    assert 0 < rig.stat("dict_spilled_blocks") <= 16


def test_what_is_being_written_is_ahead_already() -> None:
    """A disk that takes its time is not handed all of host memory."""
    rig = DeepRig(2, write=Back())
    rig.faulty.faults = HUNG
    engine = rig.join()
    for n in range(16):
        fill(engine, chain(1, 100 * n))
    for _ in range(4):
        assert engine.found(chain(1, 1500)) == 1
    assert rig.stat("dict_write_queue_bytes") == TARGET * SLOT
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


def test_a_disk_that_refuses_is_not_asked_again_and_again() -> None:
    rig = DeepRig(2, write=Back(), limit=SLOT)  # a frame is larger than its payload
    engine = rig.join()
    for n in range(16):
        fill(engine, chain(1, 100 * n))
    rig.settle()
    refused = rig.stat("dict_skipped_too_large")
    assert refused > 0
    rig.turns()
    rig.settle()
    assert rig.stat("dict_skipped_too_large") == refused


def test_writing_ahead_is_cut_into_slices() -> None:
    """A long prompt is to be written: its prefix is looked through a few blocks at a time."""
    blocks = 15 * SLOTS
    rig = DeepRig(17 + 17 // SHARE, write=Back())
    fill(rig.join(), chain(blocks))
    assert not rig.level.writes.queued_bytes
    rig.hierarchy.drain(lambda: None)
    seen, more = 0, True
    while more:
        more = rig.hierarchy.turn()
        assert rig.level.writes.queued_bytes - seen <= TURN_BLOCKS * SLOT
        seen = rig.level.writes.queued_bytes
    assert seen == blocks * SLOT
    rig.settle()


def test_no_more_is_named_to_go_next_than_can_be_looked_at_in_a_turn() -> None:
    rig = DeepRig(2 * MAX_NEXT // SLOTS)
    engine = rig.join()
    for n in range(2 * MAX_NEXT):
        fill(engine, chain(1, 10 * n))
    rig.settle()
    named = rig.hierarchy.slabs.next_to_go(1 << 50)
    assert len(named) == len(set(named)) == MAX_NEXT
    assert rig.hierarchy.slabs.next_to_go(0) == []


def test_a_disk_that_hangs_ends_no_drain() -> None:
    rig = DeepRig(2, write=Back())
    engine = rig.join()
    fill(engine, chain(6))
    rig.faulty.faults = HUNG
    assert not drain(rig)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert len(rig.below.blocks) == 6


def test_what_is_forgotten_while_the_well_ends_is_not_written() -> None:
    rig = DeepRig(2, write=Back())
    engine = rig.join()
    fill(engine, chain(6))
    engine.scheduler.say(m.Forget(0, at(chain(6), 5)))
    rig.turns()
    rig.hierarchy.drain(lambda: None)
    rig.settle()
    assert below(rig, engine, chain(6)) == list(range(5))
