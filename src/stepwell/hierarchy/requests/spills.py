"""Taking blocks in: slots are leased to a session for filling, and a block is published when every rank has written
its shard. Until then it cannot be read; if any rank drops it, it is given up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState
from stepwell.events import BlocksSpilled, SpillRefused
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.pauses import PAUSED
from stepwell.hierarchy.requests.uses import AbsentUses
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.session import NAMED, Fill, Session, SessionPhase
from stepwell.hierarchy.work import ROOM_WAIT_S, Work, WorkStep
from stepwell.policies.placement.base import Destination
from stepwell.protocol.messages import MAX_DIGESTS, Granted, Reserve


class Spills:
    def __init__(
        self,
        core: Core,
        arena: Arena,
        slabs: SlabPool,
        stack: Stack,
        migration: Migration,
        uses: AbsentUses,
        canaries: CanaryJudge,
    ) -> None:
        self._arena = arena
        self._slabs = slabs
        self._index = core.index
        self._clock = core.clock
        self._emit = core.emit
        self._pauses = core.pauses
        self._stack = stack
        self._migration = migration
        self._uses = uses
        self._canaries = canaries
        self._leases = 0

    def reserve(self, session: Session, message: Reserve) -> Work:
        """Leases a slot set per block, in order; stops at the first that finds no room or is not worth it (a tail
        without its head is useless). Blocks that are here or being filled are refused: nothing needs to be copied."""
        assert session.owner is not None
        origins = session.origins(message.epoch)
        if self._canaries.bars(origins):
            self.refuse(session, message, "quarantined")
            return
        origin = origins[0]
        parent = self._index.find(origin.name(message.parent)) if message.parent else None
        leases: list[int] = []
        granted: list[Entry] = []
        depth, ends = self._behind(session, origins, message.parent)
        below = self._stack.keeps
        patient_until = self._clock.now() + ROOM_WAIT_S
        for id in self._needed(session, origin, message, depth):
            if session.phase is not SessionPhase.LIVE:
                return
            leases.append(0)
            place: Destination | None = None
            while not ends:
                entry = self._index.find(id)
                if self._pauses.spills:
                    ends = PAUSED
                    break
                if entry is not None:
                    self._emit(SpillRefused("filling" if entry.state is BlockState.FILLING else "resident"))
                    parent = entry
                    break
                patient = self._clock.now() < patient_until
                if not (patient and self._slabs.awaits_slab(session.owner, session.copiers)):
                    if parent is not None and self._index.find(parent.id) is not parent:
                        parent = None  # dropped since the last slice
                    place = place or self._arena.place(session.owner, id, session.shards, below=below)
                    entry = self._take(session, id, parent, place, below=below)
                    if entry is not None:
                        entry.origin = origin
                        if message.first >= 0:
                            entry.position = message.first + len(leases) - 1
                        leases[-1] = self._lease(session, entry)
                        granted.append(entry)
                        parent = entry
                        break
                    # What is granted has to be filled first, and then written: until then there is no more room.
                    if granted or not (below and patient) or place is Destination.COLD:
                        ends = "not_worth_it" if place is Destination.COLD else "no_room"
                        break
                yield WorkStep.PARK
                if session.phase is not SessionPhase.LIVE:
                    return
            if ends:
                self._emit(SpillRefused(ends))
            yield WorkStep.DONE
        if session.scheduler is not None:
            session.scheduler.channel.send(Granted(message.spill, leases, b"".join(e.refs for e in granted), ends))
        self._slabs.populate(session.owner)

    def _needed(self, session: Session, origin: Origin, message: Reserve, depth: int) -> Iterator[BlockId]:
        """The ids of these blocks, of which the first has so many before it. A few at a time, the use of those that are
        not here is noted, before any of them is taken. Parts of a tail are worth what the end of its prefix is: without
        them all of it is computed again."""
        first, digests, tail = True, message.digests, min(message.depth, MAX_DIGESTS)
        for at in range(0, len(digests), 32 * NAMED):
            ids = origin.names(digests[at : at + 32 * NAMED])
            found = [self._index.find(id) for id in ids]
            absent = {
                id: tail if tail > 0 else depth + place
                for place, (id, entry) in enumerate(zip(ids, found, strict=True), at // 32)
                if entry is None or self._stack.disown(entry)
            }
            self._uses.note(session, absent, first=first)
            first = first and not absent
            yield from ids

    def _behind(self, session: Session, origins: Iterable[Origin], parent: bytes) -> tuple[int, str]:
        """How many blocks are before the one behind `parent`, 0 if that is not known, and the reason why it is not to
        be taken: nothing behind a block that is known and held nowhere is of use."""
        assert session.owner is not None
        depth, missing = 0, False
        for id in [origin.name(parent) for origin in origins if parent]:
            history = self._arena.known(session.owner, id)
            if id in self._index or self._stack.find(id) is not None:
                return (history.depth + 1 if history is not None else 0), ""
            if history is not None:
                depth, missing = history.depth + 1, True
        return depth, "no_parent" if missing else ""

    def _take(
        self, session: Session, id: BlockId, parent: Entry | None, place: Destination, *, below: bool
    ) -> Entry | None:
        """A block to be filled; None: there is no room for it, or it is not worth any.

        Where a tier `below` keeps blocks, one behind as many of its prefix as host memory holds passes through, and so
        do all behind it: each stays until it is written. What is kept of a long context is its head."""
        assert session.owner is not None
        reserve = partial(self._arena.reserve, session.owner, id, shards=session.shards, members=session.copiers)
        entry, passes = None, parent is not None and parent.history.passing and below
        if place is Destination.HOT and not passes:
            entry = reserve(parent)
        if (
            entry is None
            and place is not Destination.COLD
            and self._stack.takes(session.owner.slot_bytes * session.shards)
        ):
            entry = reserve(None, passing=True, displaces=False) or reserve(None, passing=True)
        return entry

    def refuse(self, session: Session, message: Reserve, reason: str) -> None:
        blocks = len(message.digests) // 32
        for _ in range(blocks):
            self._emit(SpillRefused(reason))
        if session.scheduler is not None:
            session.scheduler.channel.send(Granted(message.spill, [0] * blocks, b"", reason))

    def _lease(self, session: Session, entry: Entry) -> int:
        self._leases += 1
        self._index.add(entry)
        session.fills[self._leases] = Fill(entry, set(session.writers))
        session.filling[entry.id] = self._leases
        return self._leases

    def filled(self, session: Session, rank: int, leases: list[int], dropped: list[int]) -> bool:
        """One rank's acknowledgements; True if a block was published or given up."""
        ended = False
        gone = set(dropped)
        landed: list[Entry] = []
        for number in (*leases, *dropped):
            fill = session.fills.get(number)
            if fill is None or rank not in fill.missing:
                continue
            fill.missing.remove(rank)
            fill.dropped |= number in gone
            if fill.missing:
                continue
            ended = True
            if fill.dropped or (fill.entry.origin is not None and self._canaries.bars((fill.entry.origin,))):
                self.abandon(session, number, quarantine=False)
                continue
            self._settle(session, number)
            self._arena.commit(fill.entry)
            landed.append(fill.entry)
        if landed:
            self._emit(BlocksSpilled(len(landed), sum(entry.nbytes for entry in landed)))
            self._migration.spilled(landed)
        return ended

    def abandon(self, session: Session, number: int, *, quarantine: bool) -> bool:
        """A lease ends unfilled; False: there is none. With `quarantine` its slots stay unusable until they are
        cleansed."""
        fill = self._settle(session, number)
        if fill is None:
            return False
        self._index.remove(fill.entry)
        self._arena.fail(fill.entry, quarantine=quarantine)
        self._emit(SpillRefused("abandoned"))
        return True

    @staticmethod
    def _settle(session: Session, number: int) -> Fill | None:
        fill = session.fills.pop(number, None)
        if fill is not None:
            del session.filling[fill.entry.id]
        return fill
