"""The `host` tier: slabs of shared memory, their slots, and which block lies in which.

Plain data structure, single-threaded, no I/O but the making of memory: populating and punching are returned to the
caller as jobs. Who may ask for what is the hierarchy's business. `check` proves the books.

A slot's life:   free -> reserve -> (entry FILLING) -> commit -> (RESIDENT) -> evict -> free
                                       '-> fail -> free, or quarantined while a zombie may still write it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from stepwell.block.layout import LEAST_SLAB, SlabLayout
from stepwell.block.namespace import BlockId
from stepwell.block.state import Event, State
from stepwell.errors import StepwellError
from stepwell.hierarchy.arena.entry import Entry
from stepwell.hierarchy.arena.former import A_FEW, Former
from stepwell.hierarchy.arena.residents import Residents
from stepwell.hierarchy.arena.retired import Retired, Submit
from stepwell.hierarchy.arena.slab import Owner, Phase, Slab
from stepwell.hierarchy.arena.slab_queue import SlabQueue
from stepwell.hierarchy.arena.standing import Standing
from stepwell.hierarchy.arena.sums import Sums
from stepwell.hierarchy.work import SLAB_WAIT_S
from stepwell.io.clock import Clock
from stepwell.io.memory import Memory
from stepwell.policies.catalog import POLICIES, TierPolicy
from stepwell.policies.past import PastTally
from stepwell.policies.placement.base import Place, Placement
from stepwell.policies.placement.by_worth import ByWorth

AHEAD_BYTES = 128 << 20
"""Populated before it is asked for: KV of one long prompt."""

MOMENT_S = 1e-6
"""Between two requests, at least: policies tell them apart by their time."""

LOOKED_AT = 8
"""Slabs of each other owner that are weighed against a need."""
MOST_NEXT = 128
"""Blocks of an owner that are named as the next to go."""


@dataclass(slots=True)
class Holding:
    """What one owner has. `roomy` are its serving slabs with free slots, by number."""

    residents: Residents
    slabs: list[Slab] = field(default_factory=list)
    roomy: dict[int, Slab] = field(default_factory=dict)
    entries: int = 0
    free: int = 0
    making: bool = False
    present: bool = True  # an engine of it is connected

    @property
    def over(self) -> bool:
        """There is nothing to hold, nor will there be."""
        return not (self.present or self.making or self.slabs)


class Watch(Protocol):
    """What the arena's owner is told, in the middle of the arena's work: it must not call the arena back."""

    def serving(self, slab: Slab | None) -> None:
        """The slab is populated: members may map it. None: a slab could not be made."""

    def retired(self, slab: Slab) -> None:
        """Members are to unmap the slab."""

    def dropped(self, entry: Entry, reason: str) -> None:
        """A resident block is gone, and why."""

    def troubled(self, error: StepwellError) -> None:
        """Memory for a slab was refused, or does not come back."""


class Arena:
    """Invariants: bytes of all slabs <= host_bytes; a slot is free, held by one entry, or quarantined; an entry that is
    leased, pinned or FILLING keeps its slots; a retired slab holds nothing, and counts until no member keeps its pages.
    Each owner's blocks have a policy of their own, made by `policy`."""

    def __init__(
        self,
        host_bytes: int,
        memory: Memory,
        submit: Submit,
        watch: Watch,
        clock: Clock,
        *,
        slab_bytes: int = LEAST_SLAB,
        policy: Callable[[], TierPolicy] = POLICIES["default"],
        placement: Placement | None = None,
    ) -> None:
        self.host_bytes = host_bytes
        self._clock = clock
        self._policy = policy
        self._placement = placement or ByWorth()
        self._slab_bytes = slab_bytes
        self._memory = memory
        self._submit = submit
        self._watch = watch
        self.holdings: dict[Owner, Holding] = {}
        self.tally = PastTally()
        self.former = Former(host_bytes, self.tally)
        self.slabs: dict[int, Slab] = {}
        self._numbers = 0
        self._moment = 0.0
        self.bytes = 0
        self.retired = Retired(submit, clock, self._freed, watch.troubled)
        self.pins = 0
        self.pinned_bytes = 0
        self.sums = Sums()
        self.trouble: StepwellError | None = None
        self._queue = SlabQueue(clock)

    def follow(self, placement: Placement) -> None:
        """From now on this policy says where blocks are to lie."""
        self._placement = placement

    # slabs ------------------------------------------------------------------------------------------------------------

    def came(self, owner: Owner) -> None:
        """An engine of this owner is connected, until `gone`: `populate` works for it."""
        holding = self.holdings.get(owner)
        if holding is None:
            residents = self.former.back(owner)
            if residents is None:
                residents = Residents(self._policy(), self.host_bytes // owner.slot_bytes, self.tally)
            holding = self.holdings[owner] = Holding(residents)
        holding.present = True
        self.populate(owner)

    def gone(self, owner: Owner) -> None:
        """No engine of this owner is connected any more. What it holds stays until others need the room; without that,
        only some of what is remembered of it does."""
        self._queue.leave(owner)
        if (holding := self.holdings.get(owner)) is not None:
            holding.present = False
            self._close(owner)

    def _close(self, owner: Owner) -> None:
        """If there is nothing to hold any more."""
        if self.holdings[owner].over:
            self.former.add(owner, self.holdings.pop(owner).residents)

    def tidy(self) -> None:
        """A slice of forgetting owners that have gone, while there are too many."""
        if self.former.too_many:
            self.former.forget()

    def _layout(self, owner: Owner) -> SlabLayout:
        """Of its slabs."""
        return SlabLayout.within(self.host_bytes, owner.slot_bytes, self._slab_bytes)

    def populate(self, owner: Owner) -> None:
        """Sees to it that the owner has or gets free slots ahead of its need: half a slab, and 128 MiB where `host` has
        room (one long prompt), though no more than half of `host`: as much as one request may pin."""
        layout = self._layout(owner)
        holding = self.holdings.get(owner)
        if holding is None or not holding.present or holding.making or not layout.slots:
            return
        if self._queue.turn() not in (None, owner):
            self._wait(owner)
            return
        short = holding.free <= layout.slots // 2
        if self.bytes + layout.nbytes <= self.host_bytes:
            ahead = min(AHEAD_BYTES, self.host_bytes // 2) // layout.nbytes
            if not short and holding.free >= ahead * layout.slots:
                return
        elif not short:
            return
        elif not self._retire_for(owner, layout.nbytes):
            self._wait(owner)
            return
        try:
            memory = self._memory.make(layout.nbytes)
        except StepwellError as error:
            self._troubled(error)
            self._wait(owner, failed=True)
            return
        self._queue.given(owner)
        self._numbers += 1
        slab = Slab(self._numbers, owner, layout, memory)
        self.slabs[slab.number] = slab
        self.bytes += layout.nbytes
        holding.making = True
        self._populate_piece(slab)

    def _wait(self, owner: Owner, *, failed: bool = False) -> None:
        """An owner that has slabs asks again when it needs more; one that has none may have no reason to ask."""
        holding = self.holdings[owner]
        if holding.present and not holding.slabs:
            self._queue.enter(owner, failed=failed)

    def serve_queue(self) -> None:
        """Gives slabs to owners that wait for their first one, as far as slabs may be taken now."""
        refused = math.inf
        for owner in self._queue.waiting():
            nbytes = self._layout(owner).nbytes
            if nbytes >= refused:
                continue  # what keeps one waiting keeps those that need as much waiting as well
            self.populate(owner)
            if owner in self._queue:
                if self._expected(self.retired.overdue()) >= nbytes:
                    return  # it waits for what is becoming free, or the system refused it memory
                refused = nbytes

    @property
    def next_moment(self) -> float | None:
        """When `serve_queue` is to be called, at the latest; None: no owner waits."""
        return self._queue.next_moment

    def _troubled(self, error: StepwellError) -> None:
        self.trouble = error
        self._watch.troubled(error)

    def _populate_piece(self, slab: Slab) -> None:
        start, length = slab.next_piece()

        def done(error: BaseException | None) -> None:
            if slab.number not in self.slabs:
                return  # closed meanwhile
            if error is not None:
                if isinstance(error, StepwellError):
                    self._troubled(error)
                self.holdings[slab.owner].making = False
                self._wait(slab.owner, failed=True)
                self._close(slab.owner)
                self.retired.add(slab)
                self._watch.serving(None)
                return
            slab.populated += length
            if slab.populated < slab.layout.nbytes:
                self._populate_piece(slab)
                return
            self.trouble = None
            slab.phase = Phase.SERVING
            slab.unused_since = self._clock.now()
            holding = self.holdings[slab.owner]
            holding.making = False
            holding.slabs.append(slab)
            holding.roomy[slab.number] = slab
            holding.free += len(slab.free)
            self._watch.serving(slab)
            self.serve_queue()
            self.populate(slab.owner)

        self._submit(lambda: slab.memory.populate(start, length), done)

    def serving(self, owner: Owner) -> Sequence[Slab]:
        """The owner's slabs that members may map."""
        holding = self.holdings.get(owner)
        return tuple(holding.slabs) if holding else ()

    def slab(self, number: int) -> Slab | None:
        return self.slabs.get(number)

    def _retire_for(self, owner: Owner, nbytes: int) -> bool:
        """Makes room by retiring the least valuable idle slabs of other owners, if there are enough of them or all is
        kept that becomes free, since it is the owner's turn; True if `nbytes` fit now. If not, the owner gets its slab
        when the system has the pages of the retired ones back.

        A slab is worth the mean last use of its blocks. It goes if that is longer ago than that of the block which the
        owner would evict next itself; an owner that has nothing to evict always finds room. Candidates are, of each
        other owner, the slabs of blocks that would go soon and of a few more, others each time: that bounds the search
        by owners x slots of some slabs. Of slabs worth the same, those of owners with the most go first. What a member
        has kept for too long is not counted on, nor is more given to it to keep. A slab that its owner waits for is
        left to it: two of them would take each other's, and neither get on.
        """
        overdue = self.retired.overdue()
        idlers = frozenset().union(*(slab.keepers for slab in overdue))
        expected = self._expected(overdue)
        mine = self.holdings[owner].residents.next()
        candidates: dict[int, Slab] = {}
        for other, holding in self.holdings.items():
            if other == owner:
                continue
            for slab in holding.slabs:
                if not slab.held and not slab.quarantined and not self._awaited(slab, holding):
                    candidates[slab.number] = slab
                    break
            for entry in holding.residents.few(LOOKED_AT):
                candidates.update((s.number, s) for s, _ in entry.slots)
        idle = [s for s in candidates.values() if s.phase is Phase.SERVING and self._idle(s)]
        idle = [s for s in idle if not s.keepers & idlers]
        idle.sort(key=lambda slab: (self._worth(slab), -len(self.holdings[slab.owner].slabs)))
        chosen: list[Slab] = []
        for slab in idle:
            if expected >= nbytes:
                break
            if mine is None or self._worth(slab) < mine.standing.used:
                chosen.append(slab)
                expected += slab.layout.nbytes
        if expected >= nbytes or self._queue.turn() == owner:
            for slab in chosen:
                self._retire(slab, heir=owner)
        return self.bytes + nbytes <= self.host_bytes

    def _expected(self, overdue: Iterable[Slab]) -> int:
        """Bytes that are free when those of retired slabs are, but for what members keep for too long."""
        return self.host_bytes - self.bytes + self.retired.bytes - sum(slab.layout.nbytes for slab in overdue)

    def _awaited(self, slab: Slab, holding: Holding) -> bool:
        """It was made a moment ago, and has all the slots that its owner has free."""
        since = slab.unused_since
        return since is not None and len(holding.roomy) == 1 and self._clock.now() < since + SLAB_WAIT_S

    @staticmethod
    def _idle(slab: Slab) -> bool:
        return not slab.quarantined and all(
            e.state is State.RESIDENT and not (e.pins or e.leases) for e in slab.held.values()
        )

    @staticmethod
    def _worth(slab: Slab) -> float:
        return sum(e.standing.used for e in slab.held.values()) / len(slab.held) if slab.held else -math.inf

    def _retire(self, slab: Slab, heir: Owner) -> None:
        for entry in dict.fromkeys(slab.held.values()):  # once each, however many shards lie here
            self.drop(entry, "retired")
        holding = self.holdings[slab.owner]
        holding.slabs.remove(slab)
        holding.roomy.pop(slab.number, None)
        holding.free -= len(slab.free)
        self._close(slab.owner)
        slab.forget_generations()
        self._watch.retired(slab)
        self.retired.add(slab, heir)

    def _freed(self, slab: Slab, heir: Owner | None) -> None:
        del self.slabs[slab.number]
        slab.memory.close()
        self.bytes -= slab.layout.nbytes
        if heir is not None:
            self.populate(heir)
        self.serve_queue()

    def unmapped(self, member: int, slab: Slab) -> None:
        """The member keeps this retired slab's pages no more."""
        slab.keepers.discard(member)
        self.retired.part_with(slab)

    def let_go(self, member: int) -> None:
        """The member keeps nothing any more: its process has ended, or says so."""
        for slab in [slab for slab in self.slabs.values() if member in slab.keepers]:
            self.unmapped(member, slab)

    def keeps(self, member: int) -> bool:
        return any(member in slab.keepers for slab in self.slabs.values())

    # slots ------------------------------------------------------------------------------------------------------------

    def awaits_slab(self, owner: Owner, members: frozenset[int]) -> bool:
        """No slot is free for these members, but a slab is being made, or mapped by them: better to wait for it than to
        evict. Starts making one where `host` has room."""
        self.populate(owner)
        holding = self.holdings[owner]
        if any(members <= slab.mapped for slab in holding.roomy.values()):
            return False
        return holding.making or bool(holding.roomy)

    def known(self, owner: Owner, id: BlockId) -> Standing | None:
        """What is remembered of a block's use, held or not."""
        holding = self.holdings.get(owner)
        return holding.residents.known(id) if holding else None

    def asked(self, owner: Owner, id: BlockId, depth: int, seconds: float, *, first: bool) -> None:
        """A request needs this block, which is not here; `first` of those that it needs. `depth` and `seconds` as of
        `Standing`."""
        holding = self.holdings.get(owner)
        if holding is not None:
            holding.residents.asked(id, depth, seconds, self._now() if first else self._moment)
            self._forget()

    def _forget(self) -> None:
        """Something of the past, if there is too much: of owners that have gone, else of the one with the most."""
        if self.former.full and not self.former.forget():
            most = max(self.holdings.values(), key=lambda holding: holding.residents.remembered)
            most.residents.forget(A_FEW)

    def place(self, owner: Owner, id: BlockId, shards: int, *, below: bool) -> Place:
        """Where a block that was asked for is to lie. `below`: there is a tier that keeps it or takes it."""
        holding = self.holdings.get(owner)
        standing = holding.residents.known(id) if holding else None
        if holding is None or standing is None:
            return Place.HOT
        displaced = holding.residents.next() if holding.free < shards else None
        return self._placement.place(admitted=holding.residents.admits(standing, displaced), below=below)

    def reserve(
        self,
        owner: Owner,
        id: BlockId,
        parent: Entry | None,
        shards: int,
        members: frozenset[int],
        *,
        passing: bool = False,
    ) -> Entry | None:
        """A FILLING entry with `shards` populated slots in slabs that all `members` have mapped; None if there is no
        room. Evicts the owner's blocks where needed, the next to go first. One that was never asked for is so now.
        `passing`: it is to leave before all that the policy ranks."""
        holding = self.holdings.get(owner)
        if holding is None:
            return None
        if parent is not None:
            parent.children += 1  # first of all, so that room is not made by evicting it
        slots: list[tuple[Slab, int]] = []
        while len(slots) < shards:
            slab = next((s for s in holding.roomy.values() if members <= s.mapped), None)
            if slab is not None:
                slots.append((slab, self._take(holding, slab)))
            elif not self._evict(holding, members):
                for taken, slot in slots:
                    self._put(taken, slot)
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
        holding.entries += 1
        self.sums.filling += 1
        return entry

    @staticmethod
    def _take(holding: Holding, slab: Slab) -> int:
        holding.free -= 1
        slot = slab.free.pop()
        if not slab.free:
            del holding.roomy[slab.number]
        return slot

    def _put(self, slab: Slab, slot: int) -> None:
        slab.free.append(slot)
        holding = self.holdings[slab.owner]
        holding.free += 1
        holding.roomy[slab.number] = slab

    def _evict(self, holding: Holding, members: frozenset[int]) -> bool:
        """Drops one block. False when none can go (or none would free a slot that these members can use)."""
        victim = holding.residents.next()
        if victim is None or not all(members <= s.mapped for s, _ in victim.slots):
            return False
        self.drop(victim, "evicted")
        return True

    def next_to_go(self, nbytes: int) -> list[Entry]:
        """About which blocks each owner would lose if so many more bytes came for it: none where there is room. At most
        MOST_NEXT of each."""
        found: list[Entry] = []
        for owner, holding in self.holdings.items():
            layout = self._layout(owner)
            if holding.making or not layout.slots:
                continue
            room = holding.free + (self.host_bytes - self.bytes) // layout.nbytes * layout.slots
            short = min(-(-nbytes // owner.slot_bytes) - room, MOST_NEXT)
            if short > 0:
                found += holding.residents.few(short)
        return found

    def commit(self, entry: Entry) -> None:
        """All ranks have written it: RESIDENT from now on."""
        entry.change(Event.LAND)
        self.sums.filling -= 1
        self.sums.blocks += 1
        self.sums.block_bytes += entry.nbytes
        self._offer(entry)

    def fail(self, entry: Entry, *, quarantine: bool) -> None:
        """It will not be filled. With `quarantine` its slots stay unusable until `cleanse`. Its pins end here."""
        entry.change(Event.FAIL)
        self.sums.filling -= 1
        if entry.pins:  # of requests that do not know yet
            self.pins -= entry.pins
            self.pinned_bytes -= entry.nbytes
        self._unlink(entry)
        for slab, slot in entry.slots:
            del slab.held[slot]
            if quarantine:
                slab.quarantined.add(slot)
                self.sums.quarantined_slots += 1
            else:
                self._put(slab, slot)

    def cleanse(self, slots: Iterable[tuple[Slab, int]]) -> None:
        """Nobody can write these quarantined slots any more."""
        for slab, slot in slots:
            slab.quarantined.remove(slot)
            self.sums.quarantined_slots -= 1
            self._put(slab, slot)

    def drop(self, entry: Entry, reason: str) -> None:
        """Forgets a RESIDENT block at once; while copies still read it, its slots stay with it (DRAINING)."""
        self._watch.dropped(entry, reason)
        entry.change(Event.DRAIN if entry.leases or entry.pins else Event.GONE)
        self.sums.blocks -= 1
        self.sums.block_bytes -= entry.nbytes
        self._unlink(entry)
        if entry.state is State.ABSENT:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        for slab, slot in entry.slots:
            del slab.held[slot]
            self._put(slab, slot)

    def _unlink(self, entry: Entry) -> None:
        holding = self.holdings[entry.slots[0][0].owner]
        holding.entries -= 1
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
        for entry in run:
            if residents.may_stay(entry) and self._placement.place(admitted=True, below=True) is Place.HOT:
                residents.stay(entry)

    def _now(self) -> float:
        self._moment = max(self._clock.now(), self._moment + MOMENT_S)
        return self._moment

    def pin(self, entry: Entry) -> None:
        if not entry.pins:
            self.pinned_bytes += entry.nbytes
        entry.pins += 1
        self.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Ends a pin, if it has not ended with the block."""
        if entry.state is State.ABSENT:
            return
        entry.pins -= 1
        self.pins -= 1
        if not entry.pins:
            self.pinned_bytes -= entry.nbytes
            self._settle(entry)

    def lease(self, entry: Entry) -> None:
        self.sums.leased_blocks += not entry.leases
        entry.leases += 1

    def release(self, entry: Entry) -> None:
        entry.leases -= 1
        self.sums.leased_blocks -= not entry.leases
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """After a hold has ended."""
        if entry.pins or entry.leases:
            return
        if entry.state is State.DRAINING:
            entry.change(Event.GONE)
            self._free(entry)
        else:
            self._offer(entry)

    def _offer(self, entry: Entry) -> None:
        holding = self.holdings[entry.slots[0][0].owner]
        holding.residents.offer(entry)

    # books ------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Everything that holds slots."""
        return list({id(e): e for s in self.slabs.values() for e in s.held.values()}.values())

    def walk(self) -> Iterator[Entry]:
        """Every entry, once. Where others get a turn in between, an entry may be gone by the time it comes, and slabs
        that come or go may be left out."""
        for slab in list(self.slabs.values()):
            for slot, entry in list(slab.held.items()):
                if entry.slots[0] == (slab, slot):
                    yield entry

    def count(self) -> dict[str, int]:
        """What the arena holds, for `stats`: sums that are kept, so that asking costs nothing."""
        return {
            "slabs": sum(len(h.slabs) for h in self.holdings.values()),
            "slab_bytes": self.bytes,
            "kept_bytes": self.retired.kept,
            **asdict(self.sums),
            "pinned_bytes": self.pinned_bytes,
            "free_slots": sum(h.free for h in self.holdings.values()),
        }

    @property
    def blocks(self) -> int:
        """Resident blocks."""
        return self.sums.blocks

    def close(self) -> None:
        """Unmaps and closes everything. No job may be running any more."""
        for slab in self.slabs.values():
            slab.memory.close()
        self.slabs.clear()
        self.holdings.clear()
        self.former = Former(self.host_bytes, PastTally())
        self.retired.clear()
        self.bytes = 0
