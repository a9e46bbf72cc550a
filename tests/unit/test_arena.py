"""The arena: its contract kit, and what only this implementation promises."""

from __future__ import annotations

import pytest

from stepwell.block.layout import MiB
from stepwell.errors import IntegrityError
from stepwell.hierarchy.arena import Arena, Watch
from stepwell.hierarchy.slab import Phase
from stepwell.hierarchy.work import SLAB_WAIT_S
from stepwell.io.memory import Memory
from stepwell.policies.catalog import POLICIES
from stepwell.testing.arena_kit import MEMBER, SLAB, SLOTS, ArenaKit, name, owner
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import Faults, SeededExecutor


class TestArena(ArenaKit):
    def make(self, host_bytes: int, memory: Memory, executor: SeededExecutor, watch: Watch) -> Arena:
        self.clock = SetClock()
        return Arena(host_bytes, memory, executor.submit, watch, self.clock, policy=POLICIES["lru"])

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
        bench.executor.faults = Faults(fail=1.0)
        bench.arena.populate(owner())
        bench.executor.step()  # the job fails
        bench.executor.step()  # and says so; the memory is punched next
        assert bench.arena.bytes == SLAB
        bench.executor.faults = Faults()
        bench.settle()
        assert bench.arena.bytes == 0
        assert not bench.served
        bench.grow(owner())
        assert bench.served

    def test_a_completion_that_never_comes_holds_its_own_bytes_and_no_more(self) -> None:
        bench = self.bench(3 * SLAB)
        bench.executor.faults = Faults(drop=1.0)
        bench.grow(owner(1))
        bench.executor.faults = Faults()
        bench.grow(owner(1))
        assert not bench.served  # one slab is made at a time
        bench.grow(owner(2))
        assert [slab.owner for slab in bench.served] == [owner(2)]

    def test_completions_after_close_are_harmless(self) -> None:
        bench = self.bench()
        bench.arena.populate(owner())
        bench.arena.close()
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
            bench.grow(owner(n))
            bench.chain(owner(n), range(10 * n, 10 * n + SLOTS))
        bench.grow(owner(3))
        assert [slab.owner for slab in bench.retired] == [owner(1)]
        assert bench.retired[0].phase is Phase.RETIRED

    def test_a_slab_that_its_owner_waits_for_is_not_taken(self) -> None:
        """Both would wait for ever, and the system would make memory without end."""
        bench = self.bench(SLAB)
        bench.grow(owner(1))
        bench.grow(owner(2))
        assert not bench.retired
        self.clock.advance(SLAB_WAIT_S)
        bench.grow(owner(2))
        assert [slab.owner for slab in bench.retired] == [owner(1)]

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
        bench.arena.check()

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
            (lambda: setattr(bench.arena, "bytes", 1), lambda: setattr(bench.arena, "bytes", slab.layout.nbytes)),
        ):
            bench.arena.check()
            spoil()
            with pytest.raises(IntegrityError):
                bench.arena.check()
            mend()
        bench.arena.check()
