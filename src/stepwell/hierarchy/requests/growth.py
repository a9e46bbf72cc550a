"""The next block of a request's run: pinned where it is in the arena, or promoted from below; or what is in the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.counters import Ghosts
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.requests.pins import Pins
from stepwell.hierarchy.requests.probes import Probes
from stepwell.hierarchy.requests.uses import AbsentUses
from stepwell.hierarchy.sessions.session import RecallRequest, Session
from stepwell.policies.placement.base import Destination


class Obstacle(NamedTuple):
    """The reason why a run does not grow now; `waits`: waiting may help."""

    reason: str
    waits: bool


UNWEIGHED = Obstacle("unweighed", True)
"""The next block has to be read, and whether that is worth it is not decided yet."""

UNPROBED = Obstacle("unprobed", True)
"""The next block is nowhere, as far as is known, and tiers that may have it were not asked yet."""


class RunGrowth:
    """`ghosts` are blocks that were evicted lately."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        slabs: SlabPool,
        stack: Stack,
        pins: Pins,
        probes: Probes,
        uses: AbsentUses,
        ghosts: Ghosts,
    ) -> None:
        self._index = core.index
        self._arena = arena
        self._slabs = slabs
        self._stack = stack
        self._pins = pins
        self._probes = probes
        self._uses = uses
        self._ghosts = ghosts

    def add_resident(self, session: Session, request: RecallRequest, origins: tuple[Origin, ...]) -> int:
        """Adds the blocks that come next, a few at most, as far as they are in the arena and there is room for their
        pins. Returns how many; 0 if it is not that simple, or there are none."""
        at = len(request.pinned)
        most = min(request.blocks, request.most) - at
        if request.ends or most <= 0 or self._index.find(*request.ids(at, origins)) is None:
            return 0
        if self._pins.comes_behind(session, request):
            return 0
        run = self._index.run(request.names(at, origins))[:most]
        fits = self._pins.fit(session, sum(entry.nbytes for entry in run if not entry.pins))
        if not (fits and all(session.copiers <= slab.mapped for slab in {slab for e in run for slab, _ in e.slots})):
            return 0
        self._pins.add_run(request, run)
        return len(run)

    def add_next(self, session: Session, request: RecallRequest, origins: tuple[Origin, ...]) -> Obstacle | None:
        """Adds the next block to the run. None: done, go on."""
        at = len(request.pinned)
        if at == request.blocks:
            return Obstacle("end", False)
        if request.ends:
            return Obstacle(request.ends, False)
        if at >= request.most:
            return Obstacle(request.short, False)
        ids = request.ids(at, origins)
        entry = self._index.find(*ids)
        if entry is not None and self._stack.disown(entry):
            entry = None
        if entry is None:
            promoted = self._promote(session, request, ids, origins)
            if isinstance(promoted, Obstacle):
                return promoted
            entry = promoted
        else:
            obstacle = self._obstacle(session, request, entry)
            if obstacle is not None:
                return obstacle
            if entry.state is BlockState.FILLING:
                if request.weighed is None:
                    return UNWEIGHED
                self._stack.hasten(entry, request.turn)
        self._pins.add(request, entry)
        return None

    def _obstacle(self, session: Session, request: RecallRequest, entry: Entry) -> Obstacle | None:
        """Why this block of the arena cannot be added to the run."""
        if entry.state is BlockState.FILLING and self._stack.promoting(entry) is None:
            return Obstacle("filling", bool(request.transfer) or entry.id in session.filling)
        for slab, _ in entry.slots:
            if not session.copiers <= slab.mapped:
                return Obstacle("mapping", True)
        if self._pins.comes_behind(session, request):
            return Obstacle("pins", True)
        nbytes = 0 if entry.pins else entry.nbytes
        if not self._pins.room(session, request, nbytes):
            return self._no_pins(session, request, nbytes)
        return None

    def _promote(
        self, session: Session, request: RecallRequest, ids: list[BlockId], origins: tuple[Origin, ...]
    ) -> Entry | Obstacle:
        """An entry that is being filled from below; or why there is none."""
        source = self._stack.find(*ids)
        down = source is not None and source.level.down
        if source is None or down:
            if not request.probed and self._stack.shared:
                return UNPROBED
            if self._probes.awaits(request):
                return Obstacle("staging", True)  # its wait is one for a tier
        if source is None:
            return Obstacle(self.why_absent(ids), False)
        level, id = source
        if down:
            return Obstacle("tier_down", False)
        owner, shards = session.owner, session.shards
        assert owner is not None
        nbytes = owner.slot_bytes * shards
        if not self._pins.room(session, request, nbytes):
            return self._no_pins(session, request, nbytes)
        if self._slabs.awaits_slab(owner, session.copiers) and self._slabs.trouble is None:
            return Obstacle("mapping", True)
        if request.weighed is None or request.extended:
            return UNWEIGHED
        self._count(session, request, id)
        passing = self._pins.passes(request, level, nbytes)
        passing = passing or self._arena.place(owner, id, shards, below=True) is not Destination.HOT
        displaces = not (passing and self._pins.fills_window(request, level, nbytes))
        parent = None if passing else self._parent(request)
        origin, turn = origins[ids.index(id)], request.turn
        entry = level.promote(session, origin, id, parent, turn, passing=passing, displaces=displaces)
        if entry is None and not displaces:
            return Obstacle("staging", True)  # what is under way lands, or is copied
        if entry is None and self._pins.make_room(session, request):
            entry = level.promote(session, origin, id, None, turn, passing=True)
        if entry is None:
            held = self._arena.sums.filling or self._arena.sums.leased_blocks
            held = held or self._pins_end(request)
            return Obstacle("no_room", bool(held))  # copies and reads under way end
        return entry

    def _count(self, session: Session, request: RecallRequest, id: BlockId) -> None:
        """The next block of its run is not here, and that it is needed is a use: once, however often the request has to
        wait for room."""
        at = len(request.pinned)
        if at >= request.counted:
            prefix = session.requests.get(request.prefix)  # that of a tail, which ends where its prefix does
            self._uses.note(session, {id: len(prefix.pinned) if prefix is not None else at}, first=not request.counted)
            request.counted = at + 1

    def _no_pins(self, session: Session, request: RecallRequest, nbytes: int) -> Obstacle:
        """Others' pins end; if all of them are its own, nothing is to be waited for but to hear what a tier has."""
        if request.weighed is None or request.extended:
            return UNWEIGHED  # as a stream it may be had without
        assert session.owner is not None
        if self._pins.in_share(nbytes) and self._slabs.grows(session.owner):
            return Obstacle("mapping", True)
        return Obstacle("pins", self._pins_end(request) or self._probes.awaits(request))

    def _pins_end(self, request: RecallRequest) -> bool:
        """True if there are pins of others, or of a stream whose blocks are being copied."""
        return self._pins.others(request) or (bool(request.transfer) and request.freed < len(request.pinned))

    def _parent(self, request: RecallRequest) -> Entry | None:
        """The block before the next one of the run; None where it is not in the arena any more."""
        last = request.pinned[-1] if request.pinned else None
        return last if last is not None and self._index.find(last.id) is last else None

    def why_absent(self, ids: Iterable[BlockId]) -> str:
        """The reason why a run ends before a block that is nowhere, by any of these ids."""
        return "evicted" if any(id in self._ghosts for id in ids) else "never_seen"
