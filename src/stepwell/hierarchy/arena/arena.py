"""The `host` tier: the blocks in its slots, who holds them, and which of them go when there is no room.

Plain data structure, single-threaded, no I/O. The slabs that its slots lie in come and go by `SlabPool`; who may ask
for what is the hierarchy's business; `audit` proves the books.

A slot's life:   free -> reserve -> (entry FILLING) -> commit -> (RESIDENT) -> evict -> free
                                       '-> fail -> free, or quarantined while a zombie may still write it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState, StateEvent
from stepwell.errors import StepwellError
from stepwell.hierarchy.arena.past_owners import A_FEW, PastOwners
from stepwell.hierarchy.arena.records import BlockHistory, Entry, Owner, Slab
from stepwell.hierarchy.arena.residents import Residents
from stepwell.io.clock import Clock
from stepwell.policies.catalog import POLICIES, MakePolicy
from stepwell.policies.past import PastTally
from stepwell.policies.placement.base import Destination, Placement
from stepwell.policies.placement.by_worth import ByWorth

MOMENT_S = 1e-6
"""Least time between two requests, in seconds: policies tell them apart by their time."""


@dataclass(slots=True)
class Sums:
    """Sums of the arena, kept up to date with every change so that asking costs nothing. `blocks` are RESIDENT."""

    blocks: int = 0
    block_bytes: int = 0
    filling: int = 0
    leased_blocks: int = 0
    quarantined_slots: int = 0


@dataclass(slots=True)
class Holding:
    """Slabs and blocks of one owner. `roomy`: its serving slabs with free slots, by number. `free`: slots in them.
    `making`: a slab is being populated for it. `present`: an engine of it is connected. `pinned_bytes`: of its blocks
    with pins."""

    residents: Residents
    slabs: list[Slab] = field(default_factory=list)
    roomy: dict[int, Slab] = field(default_factory=dict)
    free: int = 0
    making: bool = False
    present: bool = True
    pinned_bytes: int = 0

    @property
    def slots(self) -> int:
        """Slots of its serving slabs, which are all alike."""
        return len(self.slabs) * self.slabs[0].layout.slots if self.slabs else 0

    @property
    def over(self) -> bool:
        """True if the owner holds nothing and has no engine that might."""
        return not (self.present or self.making or self.slabs)

    def take(self, slab: Slab) -> int:
        """A free slot of this slab of `roomy`, which is free no more."""
        self.free -= 1
        slot = slab.free.pop()
        if not slab.free:
            del self.roomy[slab.number]
        return slot

    def put(self, slab: Slab, slot: int) -> None:
        """Marks the slot of this slab as free."""
        slab.free.append(slot)
        self.free += 1
        self.roomy[slab.number] = slab


class ArenaObserver(Protocol):
    """Hears of changes, in the middle of the arena's work: it must not call the arena back."""

    def serving(self, slab: Slab | None) -> None:
        """The slab is populated: members may map it. None: a slab could not be made."""

    def retired(self, slab: Slab) -> None:
        """Members are to unmap the slab."""

    def dropped(self, entry: Entry, reason: str) -> None:
        """A RESIDENT block is gone, for this reason."""

    def troubled(self, error: StepwellError) -> None:
        """Memory for a slab was refused, or does not come back."""


class Arena:
    """Invariants: a slot is free, held by one entry, or quarantined; an entry that is leased, pinned or FILLING keeps
    its slots. `host_bytes`: size of the tier. `policy` makes the policy of each owner's blocks."""

    def __init__(
        self,
        host_bytes: int,
        observer: ArenaObserver,
        clock: Clock,
        placement: Placement | None = None,
        policy: MakePolicy = POLICIES["auto"],
    ) -> None:
        self.host_bytes = host_bytes
        self._observer = observer
        self._clock = clock
        self._policy = policy
        self._placement = placement or ByWorth()
        self.holdings: dict[Owner, Holding] = {}
        self.tally = PastTally()
        self.past_owners = PastOwners(host_bytes, self.tally)
        self._moment = 0.0
        self.pins = 0
        self.pinned_bytes = 0
        self.sums = Sums()

    def follow(self, placement: Placement) -> None:
        """Sets the policy that says where blocks are to lie."""
        self._placement = placement

    # owners -----------------------------------------------------------------------------------------------------------

    def enter(self, owner: Owner) -> Holding:
        """The holding of this owner, made where there is none."""
        holding = self.holdings.get(owner)
        if holding is None:
            residents = self.past_owners.back(owner)
            if residents is None:
                residents = Residents(self._policy(), self.host_bytes // owner.slot_bytes, self.tally)
            holding = self.holdings[owner] = Holding(residents)
        return holding

    def leave_if_over(self, owner: Owner) -> None:
        """Removes an owner that holds nothing and will not, but for a limited memory of its blocks' use."""
        if self.holdings[owner].over:
            self.past_owners.add(owner, self.holdings.pop(owner).residents)

    def tidy(self) -> None:
        """Forgets a slice of the owners that have gone, while there are too many."""
        if self.past_owners.too_many:
            self.past_owners.forget()

    # slots ------------------------------------------------------------------------------------------------------------

    def known(self, owner: Owner, id: BlockId) -> BlockHistory | None:
        """The block's history, whether it is held or not; None if nothing is remembered."""
        holding = self.holdings.get(owner)
        return holding.residents.known(id) if holding else None

    def asked(self, owner: Owner, blocks: Iterable[tuple[BlockId, int, float]], *, first: bool) -> None:
        """Notes that a request needs these blocks, which are not here; `first` of those that it needs. Each with the
        depth and the seconds that are those of `BlockHistory`."""
        holding = self.holdings.get(owner)
        if holding is not None:
            holding.residents.asked(blocks, self._now() if first else self._moment)
            self._forget()

    def _forget(self) -> None:
        """Forgets some history if there is too much: of owners that have gone, else of the owner with the most."""
        if self.past_owners.full and not self.past_owners.forget():
            most = max(self.holdings.values(), key=lambda holding: holding.residents.remembered)
            most.residents.forget(A_FEW)

    def place(self, owner: Owner, id: BlockId, shards: int, *, below: bool) -> Destination:
        """Where a block that was asked for is to lie. `below`: there is a tier that keeps it or takes it."""
        holding = self.holdings.get(owner)
        history = holding.residents.known(id) if holding else None
        if holding is None or history is None:
            return Destination.HOT
        displaced = holding.residents.next() if holding.free < shards else None
        return self._placement.place(admitted=holding.residents.admits(history, displaced), below=below)

    def reserve(
        self,
        owner: Owner,
        id: BlockId,
        parent: Entry | None,
        shards: int,
        members: frozenset[int],
        *,
        passing: bool = False,
        displaces: bool = True,
    ) -> Entry | None:
        """A FILLING entry with `shards` populated slots in slabs that all `members` have mapped; None if there is no
        room. Evicts the owner's blocks where needed, the next to go first. One that was never asked for is so now.
        `passing`: it is to leave before all that the policy ranks. `displaces`: it may take the place of one of these,
        not only of what has passed."""
        holding = self.holdings.get(owner)
        if holding is None:
            return None
        if parent is not None:
            parent.children += 1  # first of all, so that room is not made by evicting it
        slots: list[tuple[Slab, int]] = []
        while len(slots) < shards:
            slab = next((s for s in holding.roomy.values() if members <= s.mapped), None)
            if slab is not None:
                slots.append((slab, holding.take(slab)))
            elif not self._evict(holding, members, displaces):
                for taken, slot in slots:
                    holding.put(taken, slot)
                if parent is not None:
                    parent.children -= 1
                    self._offer(parent)
                return None
        for slab, slot in slots:
            slab.renew(slot)
        entry = Entry(id, tuple(slots), parent)
        now = self._now() if holding.residents.known(id) is None else self._moment
        holding.residents.enter(entry, now, passing=passing)
        for slab, slot in slots:
            slab.held[slot] = entry
        self.sums.filling += 1
        return entry

    def _evict(self, holding: Holding, members: frozenset[int], displaces: bool) -> bool:
        """Drops one block. False when none can go (or none would free a slot that these members can use)."""
        victim = holding.residents.next()
        if victim is None or not (displaces or victim.history.passing):
            return False
        if not all(members <= s.mapped for s, _ in victim.slots):
            return False
        self.drop(victim, "evicted")
        return True

    def commit(self, entry: Entry) -> None:
        """All ranks have written it: RESIDENT from now on."""
        entry.change(StateEvent.LAND)
        self.sums.filling -= 1
        self.sums.blocks += 1
        self.sums.block_bytes += entry.nbytes
        self._offer(entry)

    def fail(self, entry: Entry, *, quarantine: bool) -> None:
        """It will not be filled. With `quarantine` its slots stay unusable until `cleanse`. Its pins end here."""
        entry.change(StateEvent.FAIL)
        self.sums.filling -= 1
        if entry.pins:  # of requests that do not know yet
            self.pins -= entry.pins
            self._count_pinned(entry, -entry.nbytes)
        self._unlink(entry)
        for slab, slot in entry.slots:
            del slab.held[slot]
            if quarantine:
                slab.quarantined.add(slot)
                self.sums.quarantined_slots += 1
            else:
                self.holdings[slab.owner].put(slab, slot)

    def cleanse(self, slots: Iterable[tuple[Slab, int]]) -> None:
        """Frees these quarantined slots, which no process can write any more."""
        for slab, slot in slots:
            slab.quarantined.remove(slot)
            self.sums.quarantined_slots -= 1
            self.holdings[slab.owner].put(slab, slot)

    def drop(self, entry: Entry, reason: str) -> None:
        """Forgets a RESIDENT block at once; while copies still read it, its slots stay with it (DRAINING)."""
        self._observer.dropped(entry, reason)
        entry.change(StateEvent.DRAIN if entry.leases or entry.pins else StateEvent.GONE)
        self.sums.blocks -= 1
        self.sums.block_bytes -= entry.nbytes
        self._unlink(entry)
        if entry.state is BlockState.ABSENT:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        for slab, slot in entry.slots:
            del slab.held[slot]
            self.holdings[slab.owner].put(slab, slot)

    def _unlink(self, entry: Entry) -> None:
        holding = self.holdings[entry.slots[0][0].owner]
        holding.residents.leave(entry)
        self._forget()
        if entry.parent is not None:
            entry.parent.children -= 1
            self._offer(entry.parent)
            entry.parent = None

    # use --------------------------------------------------------------------------------------------------------------

    def touch(self, run: Sequence[Entry]) -> None:
        """Consecutive blocks of one prefix are used now, by one request. What only passes through may stay, if it is
        worth it by now."""
        if not run:
            return
        residents = self.holdings[run[0].slots[0][0].owner].residents
        residents.used(reversed(run), self._now())
        for entry in [entry for entry in run if entry.history.passing]:
            if residents.may_stay(entry) and self._placement.place(admitted=True, below=True) is Destination.HOT:
                residents.stay(entry)

    def _now(self) -> float:
        self._moment = max(self._clock.now(), self._moment + MOMENT_S)
        return self._moment

    def pin(self, *run: Entry) -> None:
        """Pins these blocks of one owner."""
        nbytes = 0
        for entry in run:
            if not entry.pins:
                nbytes += entry.nbytes
            entry.pins += 1
        self.pins += len(run)
        if nbytes:
            self._count_pinned(run[0], nbytes)

    def unpin(self, *run: Entry) -> None:
        """Ends a pin of each, unless it has ended with the block. They are of one owner."""
        nbytes = 0
        for entry in run:
            if entry.state is BlockState.ABSENT:
                continue
            entry.pins -= 1
            self.pins -= 1
            if not entry.pins:
                nbytes += entry.nbytes
                if not entry.children or entry.state is BlockState.DRAINING:
                    self._settle(entry)
        if nbytes:
            self._count_pinned(run[0], -nbytes)

    def _count_pinned(self, entry: Entry, nbytes: int) -> None:
        """So many more bytes are pinned, of blocks of this one's owner."""
        self.pinned_bytes += nbytes
        self.holdings[entry.slots[0][0].owner].pinned_bytes += nbytes

    def lease(self, *run: Entry) -> None:
        for entry in run:
            self.sums.leased_blocks += not entry.leases
            entry.leases += 1

    def release(self, *run: Entry) -> None:
        for entry in run:
            entry.leases -= 1
            if not entry.leases:
                self.sums.leased_blocks -= 1
                self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Frees or offers the entry after a hold has ended."""
        if entry.state is not BlockState.DRAINING:
            self._offer(entry)
        elif not (entry.pins or entry.leases):
            entry.change(StateEvent.GONE)
            self._free(entry)

    def _offer(self, entry: Entry) -> None:
        if entry.evictable:
            self.holdings[entry.slots[0][0].owner].residents.offer(entry)

    # books ------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Everything that holds slots."""
        return list({id(e): e for h in self.holdings.values() for s in h.slabs for e in s.held.values()}.values())

    def walk(self) -> Iterator[Entry]:
        """Every entry, once. Where others get a turn in between, an entry may be gone by the time it comes, and slabs
        that come or go may be left out."""
        for slab in [slab for holding in self.holdings.values() for slab in holding.slabs]:
            for slot, entry in list(slab.held.items()):
                if entry.slots[0] == (slab, slot):
                    yield entry

    def count(self) -> dict[str, int]:
        """Figures for `stats`."""
        return {
            **asdict(self.sums),
            "pinned_bytes": self.pinned_bytes,
            "free_slots": sum(holding.free for holding in self.holdings.values()),
        }

    def clear(self) -> None:
        """Forgets everything: its slabs are gone."""
        self.holdings.clear()
        self.tally = PastTally()
        self.past_owners = PastOwners(self.host_bytes, self.tally)
