"""The arena: its contract kit, and what only this implementation promises."""

from __future__ import annotations

import pytest
from deep import DeepRig, chain, fill

from stepwell.block.layout import MiB
from stepwell.errors import IntegrityError
from stepwell.hierarchy import audit
from stepwell.hierarchy.arena.arena import Arena, ArenaObserver
from stepwell.hierarchy.arena.records import Entry, Owner, SlabPhase
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.arena.slab_queue import LOOK_S, MAX_PASSES, TURN_S
from stepwell.hierarchy.work import ROOM_WAIT_S
from stepwell.io.memory import Memory
from stepwell.policies.catalog import POLICIES
from stepwell.testing.arena_kit import MEMBER, SLAB, SLOT, SLOTS, ArenaKit, Bench, name, owner
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import JobFaults, SeededExecutor

RESTS = 10

BIG = owner(99, slot_bytes=5 * SLOT)
"""Needs two slabs and a half of the others'."""


class TestArena(ArenaKit):
    def make(
        self, host_bytes: int, memory: Memory, executor: SeededExecutor, observer: ArenaObserver
    ) -> tuple[Arena, SlabPool]:
        self.clock = SetClock()
        arena = Arena(host_bytes, observer, self.clock, policy=POLICIES["lru"])
        return arena, SlabPool(arena, memory, executor, observer, self.clock)

    def test_bookkeeping_does_not_grow_with_use(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entries = [bench.fill(owner(), n) for n in range(5)]
        for _ in range(2000):
            for entry in entries:
                bench.arena.pin(entry)
            bench.arena.touch(entries)
            for entry in entries:
                bench.arena.unpin(entry)
        (holding,) = bench.arena.holdings.values()
        assert len(holding.residents._eviction._ranks._heap) < 100  # type: ignore[attr-defined]
        assert holding.residents.next() is not None

    def test_a_failed_population_gives_the_bytes_back(self) -> None:
        bench = self.bench()
        bench.executor.faults = JobFaults(fail=1.0)
        bench.slabs.came(owner())
        bench.executor.step()  # the job fails
        bench.executor.step()  # and says so; the memory is punched next
        assert bench.slabs.bytes == SLAB
        bench.executor.faults = JobFaults()
        bench.settle()
        assert bench.slabs.bytes == 0
        assert not bench.served
        bench.grow(owner())
        assert bench.served

    def test_a_completion_that_never_comes_holds_its_own_bytes_and_no_more(self) -> None:
        bench = self.bench(3 * SLAB)
        bench.executor.faults = JobFaults(drop=1.0)
        bench.grow(owner(1))
        bench.executor.faults = JobFaults()
        bench.grow(owner(1))
        assert not bench.served  # one slab is made at a time
        bench.grow(owner(2))
        assert [slab.owner for slab in bench.served] == [owner(2)]

    def test_completions_after_close_are_harmless(self) -> None:
        bench = self.bench()
        bench.slabs.came(owner())
        bench.slabs.close()
        bench.executor.drain()
        assert not bench.served

    def test_a_slot_size_that_does_not_fit_gets_nothing(self) -> None:
        bench = self.bench()
        bench.grow(owner(slot_bytes=17 * MiB))
        assert not bench.memory.made
        assert bench.arena.reserve(owner(slot_bytes=17 * MiB), name(1), None, 1, MEMBER) is None

    def test_an_owner_without_blocks_to_evict_always_finds_room(self) -> None:
        bench = self.bench(2 * SLAB)
        for n in (1, 2):
            bench.fill_slab(owner(n))
        bench.grow(owner(3))
        assert [slab.owner for slab in bench.retired] == [owner(1)]
        assert bench.retired[0].phase is SlabPhase.RETIRED

    def test_a_slab_that_its_owner_waits_for_is_not_taken(self) -> None:
        """Both would wait for ever, and the system would make memory without end."""
        bench = self.bench(SLAB)
        bench.grow(owner(1))
        bench.grow(owner(2))
        assert not bench.retired
        self.clock.advance(ROOM_WAIT_S)
        bench.grow(owner(2))
        assert [slab.owner for slab in bench.retired] == [owner(1)]

    def test_owners_that_join_together_each_get_a_slab(self) -> None:
        """The first two are given all that there is before anything is known of the third."""
        bench = self.bench(4 * SLAB)
        for n in (1, 2):
            bench.slabs.came(owner(n))
        while bench.slabs.bytes < 4 * SLAB:
            bench.executor.step()
        bench.slabs.came(owner(3))
        bench.settle()
        self.rest(bench)
        assert [bool(bench.slabs.serving(owner(n))) for n in (1, 2, 3)] == [True, True, True]

    def test_an_owner_that_joins_a_full_arena_gets_a_slab_without_asking_again(self) -> None:
        bench = self.bench(2 * SLAB)
        held = [bench.fill_slab(owner(n)) for n in (1, 2)]
        for entry in (entry for entries in held for entry in entries):
            bench.arena.pin(entry)
        bench.grow(owner(3))
        assert not bench.slabs.serving(owner(3)), "all that there is is pinned"
        for entry in held[0]:
            bench.arena.unpin(entry)
        self.rest(bench)
        assert bench.slabs.serving(owner(3)) and [slab.owner for slab in bench.retired] == [owner(1)]
        assert bench.slabs.next_moment is None

    def test_an_owner_whose_engines_have_gone_waits_for_nothing(self) -> None:
        bench = self.bench(SLAB)
        bench.grow(owner(1))
        bench.grow(owner(2))
        assert bench.slabs.next_moment is not None
        bench.slabs.gone(owner(2))
        assert bench.slabs.next_moment is None
        self.rest(bench)
        assert not bench.retired

    def test_an_owner_that_is_refused_memory_gets_a_slab_when_there_is_some(self) -> None:
        bench = self.bench(2 * SLAB)
        bench.memory.refuse = True
        bench.grow(owner(1))
        assert bench.slabs.trouble is not None and not bench.served
        bench.memory.refuse = False
        bench.slabs.serve_queue()
        assert not bench.memory.made, "not before a while has passed"
        self.rest(bench)
        assert [slab.owner for slab in bench.served] == [owner(1)]

    def test_slabs_that_cannot_be_populated_are_tried_once_a_second(self) -> None:
        bench = self.bench(2 * SLAB)
        bench.executor.faults = JobFaults(fail=1.0)
        bench.grow(owner(1))
        self.rest(bench)
        assert not bench.served and len(bench.memory.made) <= 1 + RESTS
        bench.executor.faults = JobFaults()
        self.rest(bench)
        assert bench.served

    def test_of_unused_slabs_those_of_an_owner_with_several_go_first(self) -> None:
        bench = self.bench(4 * SLAB)
        for n in (1, 2, 3):
            bench.grow(owner(n))
        assert [len(bench.slabs.serving(owner(n))) for n in (1, 2, 3)] == [1, 2, 1]
        self.clock.advance(ROOM_WAIT_S)
        bench.grow(owner(4))
        assert [len(bench.slabs.serving(owner(n))) for n in (1, 2, 3, 4)] == [1, 1, 1, 1]

    def pinned(self, bench: Bench, *numbers: int) -> list[list[Entry]]:
        """A slab of pinned blocks of each of these owners."""
        held = [bench.fill_slab(owner(n)) for n in numbers]
        for entry in (entry for entries in held for entry in entries):
            bench.arena.pin(entry)
        return held

    def unpin(self, bench: Bench, entries: list[Entry]) -> None:
        for entry in entries:
            bench.arena.unpin(entry)
        bench.slabs.serve_queue()
        bench.settle()

    def wait(self, bench: Bench, seconds: float, asks: Owner | None = None) -> None:
        """Time passes; this owner asks for a slab all the time."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.clock.advance(LOOK_S / 4)
            if asks is not None:
                bench.slabs.awaits_slab(asks, MEMBER)
            if bench.slabs.next_moment is not None and bench.slabs.next_moment <= self.clock.now():
                bench.slabs.serve_queue()
            bench.settle()

    @pytest.mark.parametrize("first", [True, False])
    def test_who_needs_little_is_served_past_one_that_needs_more(self, first: bool) -> None:
        bench = self.bench(3 * SLAB)
        held = self.pinned(bench, 1, 2, 3)
        for late in (BIG, owner(4)) if first else (owner(4), BIG):
            bench.grow(late)
        self.unpin(bench, held[0])
        assert bench.slabs.serving(owner(4)) and not bench.slabs.serving(BIG)

    def passed_over(self, bench: Bench) -> list[list[Entry]]:
        """BIG waits as others join and are given slabs, as often as may be. What they hold is pinned."""
        held = self.pinned(bench, 1, 2, 3)
        bench.grow(BIG)
        for n in range(4, 4 + MAX_PASSES):
            bench.grow(owner(n))
            self.unpin(bench, held.pop(0))
            held += self.pinned(bench, n)
            assert bench.slabs.serving(owner(n)) and not bench.slabs.serving(BIG)
        return held

    def test_an_owner_that_needs_much_is_passed_over_so_many_times_and_no_more(self) -> None:
        """Then it gets what becomes free at several times, and who has slabs already or comes now waits."""
        bench = self.bench(3 * SLAB)
        held = self.passed_over(bench)
        late = 4 + MAX_PASSES
        bench.grow(owner(late))
        for entries in held:
            assert not bench.slabs.serving(BIG)
            self.unpin(bench, entries)
            bench.grow(owner(late - 1))
            assert not bench.slabs.serving(owner(late))
        assert bench.slabs.serving(BIG)

    def test_an_owner_whose_turn_ends_in_vain_lets_the_others_go(self) -> None:
        bench = self.bench(3 * SLAB)
        held = self.passed_over(bench)
        late = owner(4 + MAX_PASSES)
        bench.grow(late)
        self.unpin(bench, held[0])
        assert not bench.slabs.serving(late)
        self.wait(bench, TURN_S)
        assert bench.slabs.serving(late)
        for entries in held[1:]:
            self.unpin(bench, entries)
        self.wait(bench, ROOM_WAIT_S)
        assert bench.slabs.serving(BIG), "it waits on"

    def test_no_blocks_are_lost_for_room_that_would_not_be_enough(self) -> None:
        bench = self.bench(3 * SLAB)
        held = self.pinned(bench, 1, 2, 3)
        bench.grow(BIG)
        self.unpin(bench, held[0])
        self.unpin(bench, held[1])
        assert not bench.retired and not bench.dropped
        self.unpin(bench, held[2])
        assert bench.slabs.serving(BIG)

    def test_an_owner_that_asks_all_the_time_puts_off_nothing_for_the_others(self) -> None:
        bench = self.bench(3 * SLAB)
        held = self.pinned(bench, 1, 2, 3)
        bench.grow(BIG)
        bench.grow(owner(4))
        for entry in held[0]:
            bench.arena.unpin(entry)
        self.wait(bench, 2 * LOOK_S, asks=BIG)
        assert bench.slabs.serving(owner(4))

    def rest(self, bench: Bench) -> None:
        """Time passes, and nothing else happens that the test says."""
        for _ in range(RESTS):
            self.clock.advance(ROOM_WAIT_S)
            if bench.slabs.next_moment is not None and bench.slabs.next_moment <= self.clock.now():
                bench.slabs.serve_queue()
            bench.settle()

    def test_no_slab_is_made_for_an_owner_whose_engines_have_gone(self) -> None:
        bench = self.bench(4 * SLAB)
        bench.fill_slab(owner())
        made = len(bench.memory.made)
        bench.slabs.gone(owner())
        bench.slabs.populate(owner())
        bench.settle()
        assert len(bench.memory.made) == made
        bench.grow(owner())
        assert len(bench.memory.made) > made

    def test_of_slabs_made_ahead_one_is_left(self) -> None:
        bench = self.bench(4 * SLAB)
        for n in (1, 2, 3):
            bench.grow(owner(n))
        assert [slab.owner for slab in bench.retired] == [owner(1)]

    def test_shards_in_other_slabs_are_freed_with_a_retired_one(self) -> None:
        bench = self.bench(2 * SLAB)
        bench.grow(owner(1))
        bench.fill(owner(1), 0, shards=SLOTS - 1)
        bench.grow(owner(1))
        straddling = bench.fill(owner(1), 3, shards=2)
        bench.arena.touch([straddling])
        assert {slab.number for slab, _ in straddling.slots} == {1, 2}
        bench.grow(owner(2))
        assert len(bench.retired) == 1
        assert 3 in bench.gone()
        audit.arena(bench.arena, bench.slabs)

    def test_check_sees_what_is_wrong(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entry = bench.fill(owner(), 1)
        slab, slot = entry.slots[0]
        for spoil, mend in (
            (lambda: slab.free.append(slot), slab.free.pop),
            (lambda: setattr(entry, "pins", 1), lambda: setattr(entry, "pins", 0)),
            (lambda: setattr(entry, "children", 1), lambda: setattr(entry, "children", 0)),
            (lambda: slab.quarantined.add(slot), slab.quarantined.clear),
            (lambda: setattr(bench.slabs, "bytes", 1), lambda: setattr(bench.slabs, "bytes", slab.layout.nbytes)),
        ):
            audit.arena(bench.arena, bench.slabs)
            spoil()
            with pytest.raises(IntegrityError):
                audit.arena(bench.arena, bench.slabs)
            mend()
        audit.arena(bench.arena, bench.slabs)


def test_an_engine_that_writes_over_generations_does_not_end_the_well() -> None:
    """The memory is shared, and all of its members may write to it."""
    rig = DeepRig(2)
    engine = rig.join()
    fill(engine, chain(2))
    rig.settle()
    worker = engine.workers[0]
    for number, mapping in worker._mappings.items():
        mapping.bytes[: 8 * worker.shared[number].slots] = 255
    fill(engine, chain(2, 100))
    rig.settle()
    assert engine.found(chain(2, 100)) == 2
