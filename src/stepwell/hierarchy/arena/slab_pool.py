"""Slabs of the arena: made ahead of need, shared out among owners, and retired for those that need them more.

Plain data structure above `Arena`, single-threaded, no I/O but the making of memory: populating and punching are jobs
of the executor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stepwell.block.layout import MIN_SLAB, SlabLayout
from stepwell.block.state import BlockState
from stepwell.errors import StepwellError
from stepwell.hierarchy.arena.arena import Arena, ArenaObserver, Holding
from stepwell.hierarchy.arena.records import Entry, Owner, Slab, SlabPhase
from stepwell.hierarchy.arena.retired import Retired
from stepwell.hierarchy.arena.slab_queue import SlabQueue
from stepwell.hierarchy.work import ROOM_WAIT_S
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.memory import Memory

AHEAD_BYTES = 128 << 20
"""Bytes populated before they are asked for: KV of one long prompt."""

LOOKED_AT = 8
"""Slabs of each other owner that are weighed against a need."""

MAX_NEXT = 128
"""Blocks of an owner that are named as the next to go."""


class SlabPool:
    """Invariants: bytes of all slabs <= host_bytes; a retired slab holds nothing, and counts until no member keeps its
    pages. `slab_bytes`: the least of a slab, if eight slots need no more."""

    def __init__(
        self,
        arena: Arena,
        memory: Memory,
        executor: Executor,
        observer: ArenaObserver,
        clock: Clock,
        slab_bytes: int = MIN_SLAB,
    ) -> None:
        self._arena = arena
        self._holdings = arena.holdings
        self._host_bytes = arena.host_bytes
        self._clock = clock
        self._slab_bytes = slab_bytes
        self._memory = memory
        self._executor = executor
        self._observer = observer
        self.slabs: dict[int, Slab] = {}
        self._numbers = 0
        self.bytes = 0
        self.retired = Retired(executor, clock, self._freed, observer)
        self.trouble: StepwellError | None = None
        self._queue = SlabQueue(clock)

    def came(self, owner: Owner) -> None:
        """An engine of this owner is connected, until `gone`: `populate` works for it."""
        self._arena.enter(owner).present = True
        self.populate(owner)

    def gone(self, owner: Owner) -> None:
        """No engine of this owner is connected any more. What it holds stays until others need the room; without that,
        only some of what is remembered of it does."""
        self._queue.leave(owner)
        if (holding := self._holdings.get(owner)) is not None:
            holding.present = False
            self._arena.leave_if_over(owner)

    def _layout(self, owner: Owner) -> SlabLayout:
        """Layout of the owner's slabs."""
        return SlabLayout.within(self._host_bytes, owner.slot_bytes, self._slab_bytes)

    def populate(self, owner: Owner) -> None:
        """Makes a slab where needed so that the owner has free slots ahead of its need: half a slab, and 128 MiB where
        `host` has room (one long prompt), though no more than half of `host`: as much as one request may pin."""
        layout = self._layout(owner)
        holding = self._holdings.get(owner)
        if holding is None or not holding.present or holding.making or not layout.slots:
            return
        if self._queue.turn() not in (None, owner):
            self._wait(owner)
            return
        short = holding.free <= layout.slots // 2
        if self.bytes + layout.nbytes <= self._host_bytes:
            ahead = min(AHEAD_BYTES, self._host_bytes // 2) // layout.nbytes
            if not short and holding.free >= ahead * layout.slots:
                return
        elif not short or len(holding.slabs) == len(self.slabs):
            return  # there is no need, or nobody to take it from
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
        holding = self._holdings[owner]
        if holding.present and not holding.slabs:
            self._queue.enter(owner, failed=failed)

    def serve_queue(self) -> None:
        """Gives slabs to owners that wait for their first one, as far as slabs may be taken now."""
        refused = math.inf
        for owner in self._queue.waiting():
            nbytes = self._layout(owner).nbytes
            if nbytes >= refused:
                continue  # an owner that needs as much waits for the same reason
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
        self._observer.troubled(error)

    def _populate_piece(self, slab: Slab) -> None:
        start, length = slab.next_piece()

        def done(error: BaseException | None) -> None:
            if slab.number not in self.slabs:
                return  # closed meanwhile
            if error is not None:
                if isinstance(error, StepwellError):
                    self._troubled(error)
                self._holdings[slab.owner].making = False
                self._wait(slab.owner, failed=True)
                self._arena.leave_if_over(slab.owner)
                self.retired.add(slab)
                self._observer.serving(None)
                return
            slab.populated += length
            if slab.populated < slab.layout.nbytes:
                self._populate_piece(slab)
                return
            self.trouble = None
            slab.phase = SlabPhase.SERVING
            slab.unused_since = self._clock.now()
            holding = self._holdings[slab.owner]
            holding.making = False
            holding.slabs.append(slab)
            holding.roomy[slab.number] = slab
            holding.free += len(slab.free)
            self._observer.serving(slab)
            self.serve_queue()
            self.populate(slab.owner)

        self._executor.submit(lambda: slab.memory.populate(start, length), done)

    def serving(self, owner: Owner) -> Sequence[Slab]:
        """The owner's slabs that members may map."""
        holding = self._holdings.get(owner)
        return tuple(holding.slabs) if holding else ()

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
        mine = self._holdings[owner].residents.next()
        candidates: dict[int, Slab] = {}
        for other, holding in self._holdings.items():
            if other == owner:
                continue
            for slab in holding.slabs:
                if not slab.held and not slab.quarantined and not self._awaited(slab, holding):
                    candidates[slab.number] = slab
                    break
            for entry in holding.residents.few(LOOKED_AT):
                candidates.update((s.number, s) for s, _ in entry.slots)
        idle = [s for s in candidates.values() if s.phase is SlabPhase.SERVING and self._idle(s)]
        idle = [s for s in idle if not s.keepers & idlers]
        idle.sort(key=lambda slab: (self._worth(slab), -len(self._holdings[slab.owner].slabs)))
        chosen: list[Slab] = []
        for slab in idle:
            if expected >= nbytes:
                break
            if mine is None or self._worth(slab) < mine.history.used:
                chosen.append(slab)
                expected += slab.layout.nbytes
        if expected >= nbytes or self._queue.turn() == owner:
            for slab in chosen:
                self._retire(slab, heir=owner)
        return self.bytes + nbytes <= self._host_bytes

    def _expected(self, overdue: Iterable[Slab]) -> int:
        """Bytes that are free when those of retired slabs are, but for what members keep for too long."""
        return self._host_bytes - self.bytes + self.retired.bytes - sum(slab.layout.nbytes for slab in overdue)

    def _awaited(self, slab: Slab, holding: Holding) -> bool:
        """True if the slab was made a moment ago and has all the slots that its owner has free."""
        since = slab.unused_since
        return since is not None and len(holding.roomy) == 1 and self._clock.now() < since + ROOM_WAIT_S

    @staticmethod
    def _idle(slab: Slab) -> bool:
        return not slab.quarantined and all(
            e.state is BlockState.RESIDENT and not (e.pins or e.leases) for e in slab.held.values()
        )

    @staticmethod
    def _worth(slab: Slab) -> float:
        return sum(e.history.used for e in slab.held.values()) / len(slab.held) if slab.held else -math.inf

    def _retire(self, slab: Slab, heir: Owner) -> None:
        for entry in dict.fromkeys(slab.held.values()):  # once each, however many shards lie here
            self._arena.drop(entry, "retired")
        holding = self._holdings[slab.owner]
        holding.slabs.remove(slab)
        holding.roomy.pop(slab.number, None)
        holding.free -= len(slab.free)
        self._arena.leave_if_over(slab.owner)
        slab.forget_generations()
        self._observer.retired(slab)
        self.retired.add(slab, heir)

    def _freed(self, slab: Slab, heir: Owner | None) -> None:
        del self.slabs[slab.number]
        slab.close()
        self.bytes -= slab.layout.nbytes
        if heir is not None:
            self.populate(heir)
        self.serve_queue()

    def unmapped(self, member: int, slab: Slab) -> None:
        """Notes that the member has let go of this retired slab's pages."""
        slab.keepers.discard(member)
        self.retired.part_with(slab)

    def let_go(self, member: int) -> None:
        """Notes that the member keeps no pages: its process has ended, or says so."""
        for slab in [slab for slab in self.slabs.values() if member in slab.keepers]:
            self.unmapped(member, slab)

    def keeps(self, member: int) -> bool:
        return any(member in slab.keepers for slab in self.slabs.values())

    def awaits_slab(self, owner: Owner, members: frozenset[int]) -> bool:
        """No slot is free for these members, but a slab is being made, or mapped by them: better to wait for it than to
        evict. Starts making one where `host` has room."""
        self.populate(owner)
        holding = self._holdings[owner]
        coming = holding.making or bool(holding.roomy)
        return coming and not any(members <= slab.mapped for slab in holding.roomy.values())

    def grows(self, owner: Owner) -> bool:
        """A slab is being made for the owner. Starts making one where it is short of slots and `host` has room."""
        self.populate(owner)
        return self._holdings[owner].making

    def next_to_go(self, nbytes: int) -> list[Entry]:
        """About which blocks each owner would lose if so many more bytes came for it: none where there is room. At most
        MAX_NEXT of each."""
        found: list[Entry] = []
        for owner, holding in self._holdings.items():
            layout = self._layout(owner)
            if holding.making or not layout.slots:
                continue
            room = holding.free + (self._host_bytes - self.bytes) // layout.nbytes * layout.slots
            short = min(-(-nbytes // owner.slot_bytes) - room, MAX_NEXT)
            if short > 0:
                found += holding.residents.few(short)
        return found

    # books ------------------------------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Figures for `stats`."""
        return {
            "slabs": sum(len(holding.slabs) for holding in self._holdings.values()),
            "slab_bytes": self.bytes,
            "kept_bytes": self.retired.kept,
        }

    def close(self) -> None:
        """Unmaps and closes everything. No job may be running any more."""
        for slab in self.slabs.values():
            slab.close()
        self.slabs.clear()
        self._arena.clear()
        self.retired.clear()
        self.bytes = 0
