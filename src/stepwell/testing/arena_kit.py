"""The contract of the arena as tests: subclass `ArenaKit`, supply `make`, and pytest runs them.

Jobs run only when a test calls `settle`, so that a test sees it if something happens too early, before a completion.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest

from stepwell.block.layout import MiB, SlabLayout
from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState
from stepwell.errors import StepwellError
from stepwell.hierarchy import audit
from stepwell.hierarchy.arena.arena import Arena, ArenaObserver
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.io.memory import Memory
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.sparse import SparseMemory

SLOT = 2 * MiB
SLOTS = 8
SLAB = SlabLayout(SLOT, SLOTS).nbytes
"""Size of a slab of few, large slots: where `host` has room for one to fifteen of these, a slab is exactly this."""

MEMBER = frozenset({1})


def owner(n: int = 1, slot_bytes: int = SLOT) -> Owner:
    return Owner("default", bytes([n]) * 32, slot_bytes)


def name(n: int) -> BlockId:
    return BlockId(n.to_bytes(32, "big"))


class _Recorder:
    """Records the messages of a bench's arena; member 1 maps each slab, if it maps any."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def serving(self, slab: Slab | None) -> None:
        if slab is None:
            return
        self._bench.served.append(slab)
        if self._bench.maps:
            slab.mapped |= MEMBER

    def retired(self, slab: Slab) -> None:
        self._bench.retired.append(slab)

    def dropped(self, entry: Entry, reason: str) -> None:
        self._bench.dropped.append((entry, reason))

    def troubled(self, error: StepwellError) -> None:
        pass


class Bench:
    """An arena with everything around it recorded; member 1 maps each slab as it is served."""

    def __init__(self, kit: ArenaKit, host_bytes: int, *, seed: int, maps: bool = True) -> None:
        self.memory = SparseMemory()
        self.executor = SeededExecutor(seed)
        self.served: list[Slab] = []
        self.retired: list[Slab] = []
        self.dropped: list[tuple[Entry, str]] = []
        self.maps = maps
        self.arena, self.slabs = kit.make(host_bytes, self.memory, self.executor, _Recorder(self))

    def settle(self) -> None:
        self.executor.drain()
        audit.arena(self.arena, self.slabs)

    def grow(self, of: Owner) -> None:
        self.slabs.came(of)
        self.settle()

    def fill(self, of: Owner, n: int, parent: Entry | None = None, shards: int = 1) -> Entry:
        """A resident block."""
        entry = self.arena.reserve(of, name(n), parent, shards, MEMBER)
        assert entry is not None
        self.arena.commit(entry)
        return entry

    def chain(self, of: Owner, numbers: range) -> list[Entry]:
        entries: list[Entry] = []
        for n in numbers:
            entries.append(self.fill(of, n, entries[-1] if entries else None))
        return entries

    def fill_slab(self, of: Owner) -> list[Entry]:
        """A slab of resident blocks, one prefix; other owners' have other numbers."""
        self.grow(of)
        first = 10 * of.model[0]
        return self.chain(of, range(first, first + SLOTS))

    def gone(self) -> list[int]:
        return [int.from_bytes(entry.id, "big") for entry, _ in self.dropped]


class ArenaKit(ABC):
    @abstractmethod
    def make(
        self, host_bytes: int, memory: Memory, executor: SeededExecutor, observer: ArenaObserver
    ) -> tuple[Arena, SlabPool]: ...

    def bench(self, host_bytes: int = SLAB, *, maps: bool = True) -> Bench:
        seed = random.randrange(1 << 32)
        print("seed", seed)  # noqa: T201 - what repeats a failure
        return Bench(self, host_bytes, seed=seed, maps=maps)

    def test_nothing_is_leased_before_it_is_populated(self) -> None:
        bench = self.bench()
        arena = bench.arena
        assert arena.reserve(owner(), name(1), None, 1, MEMBER) is None
        bench.slabs.came(owner())
        assert bench.memory.made
        assert arena.reserve(owner(), name(1), None, 1, MEMBER) is None
        bench.settle()
        assert len(bench.served) == 1
        assert arena.reserve(owner(), name(1), None, 1, MEMBER) is not None

    def test_nothing_is_leased_that_a_member_has_not_mapped(self) -> None:
        bench = self.bench(maps=False)
        bench.grow(owner())
        (slab,) = bench.served
        members = frozenset({1, 2})
        for mapped, room in ((set(), False), ({1}, False), ({2}, False), ({1, 2}, True)):
            slab.mapped = mapped
            assert (bench.arena.reserve(owner(), name(1), None, 1, members) is not None) is room
        audit.arena(bench.arena, bench.slabs)

    def test_bytes_are_bounded(self) -> None:
        bench = self.bench(5 * SLAB // 2)
        for n in range(6):
            bench.slabs.came(owner(n))
            audit.arena(bench.arena, bench.slabs)
            bench.settle()
            for block in range(3):
                bench.arena.reserve(owner(n), name(100 * n + block), None, 1, MEMBER)
            assert bench.slabs.bytes <= 5 * SLAB // 2
            assert sum(s.layout.nbytes for s in bench.served if s not in bench.retired) <= 5 * SLAB // 2
        assert len(bench.served) == 2  # a slot that is being filled is not taken away

    def test_a_refusal_of_memory_is_told_and_forgotten(self) -> None:
        bench = self.bench()
        bench.memory.refuse = True
        bench.grow(owner())
        assert bench.slabs.trouble is not None
        assert bench.slabs.bytes == 0
        bench.memory.refuse = False
        bench.grow(owner())
        assert bench.slabs.trouble is None
        assert bench.served

    def test_tails_leave_before_heads(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        first = bench.chain(owner(), range(10, 13))
        second = bench.chain(owner(), range(20, 25))
        bench.arena.touch(first)  # now the second prefix is the older one, its head the oldest block of all
        for n in range(30, 36):
            bench.fill(owner(), n)
        assert bench.gone() == [24, 23, 22, 21, 20, 12]
        assert first[0].state is BlockState.RESIDENT
        assert second[0].state is BlockState.ABSENT
        audit.arena(bench.arena, bench.slabs)

    @pytest.mark.parametrize("hold", ["pin", "lease"])
    def test_what_is_held_is_not_evicted(self, hold: str) -> None:
        bench = self.bench()
        bench.grow(owner())
        entries = [bench.fill(owner(), n) for n in range(SLOTS)]
        for entry in entries:
            getattr(bench.arena, hold)(entry)
        assert bench.arena.reserve(owner(), name(50), None, 1, MEMBER) is None
        (bench.arena.unpin if hold == "pin" else bench.arena.release)(entries[4])
        assert bench.arena.reserve(owner(), name(50), None, 1, MEMBER) is not None
        assert bench.gone() == [4]
        audit.arena(bench.arena, bench.slabs)

    def test_what_is_being_filled_is_not_evicted(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entries = [bench.arena.reserve(owner(), name(n), None, 1, MEMBER) for n in range(SLOTS)]
        assert None not in entries
        assert bench.arena.reserve(owner(), name(50), None, 1, MEMBER) is None
        audit.arena(bench.arena, bench.slabs)

    def test_what_is_being_filled_is_not_evicted_when_its_child_has_failed(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        parent = bench.arena.reserve(owner(), name(0), None, 1, MEMBER)
        child = bench.arena.reserve(owner(), name(1), parent, 1, MEMBER)
        assert parent is not None and child is not None
        bench.arena.fail(child, quarantine=False)
        assert None not in [bench.arena.reserve(owner(), name(n), None, 1, MEMBER) for n in range(2, SLOTS + 1)]
        assert bench.arena.reserve(owner(), name(50), None, 1, MEMBER) is None
        audit.arena(bench.arena, bench.slabs)

    def test_a_slot_has_another_generation_with_each_life(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entry = bench.fill(owner(), 1)
        slab, slot = entry.slots[0]
        generation = slab.generation(slot)
        bench.arena.drop(entry, "test")
        taken = [bench.arena.reserve(owner(), name(n), None, 1, MEMBER) for n in range(20, 20 + SLOTS)]
        assert (slab, slot) in [other.slots[0] for other in taken if other is not None]
        assert slab.generation(slot) > generation

    def test_a_dropped_block_keeps_its_slots_while_it_is_read(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entry = bench.fill(owner(), 1)
        (slab, slot), generation = entry.slots[0], entry.slots[0][0].generation(entry.slots[0][1])
        bench.arena.lease(entry)
        bench.arena.pin(entry)
        bench.arena.drop(entry, "test")
        for n in range(20, 40):
            taken = bench.arena.reserve(owner(), name(n), None, 1, MEMBER)
            assert taken is None or taken.slots[0] != (slab, slot)
        bench.arena.unpin(entry)
        assert slab.held[slot] is entry
        audit.arena(bench.arena, bench.slabs)
        bench.arena.release(entry)
        assert slot in slab.free
        assert slab.generation(slot) == generation  # changed when it is used again
        audit.arena(bench.arena, bench.slabs)
        again = bench.arena.reserve(owner(), name(99), None, 1, MEMBER)
        assert again is not None and again.slots == ((slab, slot),)
        assert slab.generation(slot) == generation + 1

    def test_a_quarantined_slot_is_not_used_until_it_is_cleansed(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        entry = bench.arena.reserve(owner(), name(1), None, 1, MEMBER)
        assert entry is not None
        bench.arena.fail(entry, quarantine=True)
        audit.arena(bench.arena, bench.slabs)
        for n in range(20, 40):
            taken = bench.fill(owner(), n)
            assert taken.slots != entry.slots
        bench.arena.cleanse(entry.slots)
        audit.arena(bench.arena, bench.slabs)
        assert bench.fill(owner(), 50).slots == entry.slots

    def test_a_failed_fill_is_free_at_once(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        parent = bench.fill(owner(), 1)
        entry = bench.arena.reserve(owner(), name(2), parent, 1, MEMBER)
        assert entry is not None
        bench.arena.fail(entry, quarantine=False)
        audit.arena(bench.arena, bench.slabs)
        assert parent.children == 0
        assert bench.arena.count()["free_slots"] == SLOTS - 1

    def test_all_shards_or_none(self) -> None:
        bench = self.bench()
        bench.grow(owner())
        for n in range(SLOTS - 2):
            bench.arena.pin(bench.fill(owner(), n))
        free = bench.arena.count()["free_slots"]
        assert bench.arena.reserve(owner(), name(50), None, 3, MEMBER) is None
        assert bench.arena.count()["free_slots"] == free == 2
        audit.arena(bench.arena, bench.slabs)
        entry = bench.arena.reserve(owner(), name(50), None, 2, MEMBER)
        assert entry is not None and len(set(entry.slots)) == 2

    def test_slabs_move_between_owners(self) -> None:
        bench = self.bench()
        bench.grow(owner(1))
        (slab,) = bench.served
        entries = bench.chain(owner(1), range(SLOTS))
        mapping = slab.memory.bytes  # a late reader's view
        slot = entries[3].slots[0][1]
        at = slab.layout.offset + slot * slab.layout.stride
        mapping[at : at + 4] = 7
        assert slab.generation(slot) == 1
        bench.slabs.came(owner(2))
        assert bench.retired == [slab]
        assert sorted(bench.gone()) == list(range(SLOTS))
        assert not mapping[: 8 * slab.layout.slots].any()  # members get the message at once, whenever its pages go
        assert len(bench.memory.made) == 1  # its bytes count until then
        bench.settle()
        assert not mapping[at : at + 4].any()
        assert bench.served[-1].owner == owner(2)
        assert bench.served[-1].number != slab.number
        assert bench.arena.reserve(owner(1), name(50), None, 1, MEMBER) is None
        bench.fill(owner(2), 60)

    @pytest.mark.parametrize("hold", ["pin", "lease", "filling", "quarantine"])
    def test_a_slab_in_use_is_not_retired(self, hold: str) -> None:
        bench = self.bench()
        bench.grow(owner(1))
        bench.fill(owner(1), 2)  # a neighbour that could go
        entry = bench.arena.reserve(owner(1), name(1), None, 1, MEMBER)
        assert entry is not None
        if hold == "quarantine":
            bench.arena.fail(entry, quarantine=True)
        elif hold != "filling":
            bench.arena.commit(entry)
            getattr(bench.arena, hold)(entry)
        bench.grow(owner(2))
        assert not bench.retired
        assert entry.slots[0][0].generation(entry.slots[0][1]) == 1

    def test_no_more_slabs_are_retired_than_needed(self) -> None:
        bench = self.bench(4 * SLAB)
        for n in range(2):
            bench.grow(owner(n))
            for block in range(2 * SLOTS):
                bench.fill(owner(n), 100 * n + block)
        assert len(bench.served) == 4
        for _ in range(3):
            bench.slabs.came(owner(9))
        assert [s.owner for s in bench.retired] == [owner(0)]  # the least recently used one, once
        bench.settle()
        assert bench.served[-1].owner == owner(9)

    def test_a_slab_used_later_than_my_oldest_block_stays(self) -> None:
        bench = self.bench(2 * SLAB)
        bench.grow(owner(1))
        bench.chain(owner(1), range(SLOTS))
        bench.grow(owner(2))
        bench.chain(owner(2), range(10, 10 + SLOTS))
        bench.slabs.came(owner(1))
        assert not bench.retired
        bench.slabs.came(owner(2))
        assert [slab.owner for slab in bench.retired] == [owner(1)]
        bench.settle()
