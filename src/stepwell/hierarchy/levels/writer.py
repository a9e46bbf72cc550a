"""Writes blocks of the arena to one tier when the write policy says so, which is asked at each of these events.

    published, or promoted from a level below ──► at_spill? ──┐
    used by a request ──► at_use? ────────────────────────────┼──► with the blocks before it ──► the level's queue
    next to leave, or the well ends ──────────────────────────┘

While spills are paused, only the first of these happens, to what was taken before.

After a restart a block is of no use without those before it. So these are written with it where they are not in the
tier yet, the first one first; they come to lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepwell.block.state import BlockState
from stepwell.events import BlockNotWritten
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Callback, Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.work import Work, WorkStep
from stepwell.policies.writing.base import WritePolicy

MAX_BEFORE = 64
"""Most blocks before a spilled one that are written with it: its prefix was asked for with it, so there are rarely
any."""


class Writer:
    def __init__(self, core: Core, arena: Arena, slabs: SlabPool, level: Level, policy: WritePolicy) -> None:
        self._pauses = core.pauses
        self._arena = arena
        self._slabs = slabs
        self._level = level
        self._tier = level.tier
        self._emit = core.emit
        self._work = core.work
        self._stored = level.writes.stored  # as it was when last looked at
        self._changed = False  # there is less room, or something else would leave next
        self._walking = False
        self._selective = False  # of a block's prefix, not all may have been written
        self.follow(policy)

    def follow(self, policy: WritePolicy) -> None:
        """Puts this policy in force."""
        self._policy = policy
        self._ahead = policy.ahead(self._arena.host_bytes)
        self._selective = self._selective or not policy.at_spill(1)
        self._changed = True

    def resumed(self) -> None:
        """Spills are paused no more."""
        self._changed = True

    def spilled(self, run: Sequence[Entry]) -> None:
        """These blocks have just been published."""
        if not self._level.keeps:
            return
        self._changed = True
        new: list[Entry] = []
        for entry in run:
            if self._tier.lookup(entry.id):
                self._tier.touch(entry.id)
            elif not self._policy.at_spill(entry.history.uses):
                continue
            elif self._selective:
                self._write(self._missing(entry))  # at once: what is queued is not missing for the next one
            else:
                new.append(entry)
        self._write(new)

    def promoted(self, entry: Entry) -> None:
        """The block has just come from a level below this one."""
        if self._level.keeps:
            self._changed = True
            if self._policy.at_spill(entry.history.uses) and not (self._pauses.spills or self._safe(entry)):
                self._write([entry])

    def used(self, run: Sequence[Entry], again: Sequence[Entry]) -> None:
        """A request uses these blocks, in the order of its prompt, and has used those before them. What is used here
        stays in the tier: after a restart the rest is worthless without it. Those of `again` were here already."""
        if not self._level.keeps:
            return
        self._changed = True
        for entry in run:
            self._tier.touch(entry.id)
        if self._policy.at_use() and not self._pauses.spills:
            self._write(entry for entry in again if not self._safe(entry))

    def left(self, entry: Entry) -> None:
        """Host memory needed its place."""
        if self._ahead and self._level.keeps:
            self._changed = True
            if not self._safe(entry):
                self._emit(BlockNotWritten(self._level.name, "gone"))

    def turn(self) -> None:
        """Begins to write ahead, where there is need to. What is being written is ahead of the need already. Called
        often. A write that has stored nothing is no reason to try again."""
        if self._level.writes.stored != self._stored:
            self._stored, self._changed = self._level.writes.stored, True
        if self._changed and self._ahead and not self._walking:
            self._changed = False
            if next_to_go := self._slabs.next_to_go(self._ahead - self._level.writes.queued_bytes):
                self._walking = True
                self._work.walk(self._clean(next_to_go))

    def end(self, done: Callback) -> None:
        """Queues all that is to be written before the well ends, then calls `done`."""
        if self._ahead and self._level.keeps:
            self._work.walk(self._finish(done))
        else:
            done()

    def _clean(self, entries: Iterable[Entry]) -> Work:
        for entry in entries:
            if self._pauses.spills:
                break
            yield from self._with_prefix(entry)
            yield WorkStep.DONE
        self._walking = False

    def _finish(self, done: Callback) -> Work:
        """Queues what was used last first, in case that there is no time for all."""
        entries: list[Entry] = []
        for entry in self._arena.walk():
            entries.append(entry)
            yield WorkStep.DONE
        yield from self._clean(sorted(entries, key=lambda entry: -entry.history.used))
        done()

    def _with_prefix(self, entry: Entry) -> Work:
        missing: list[Entry] = []
        at: Entry | None = entry
        while at is not None and not self._safe(at):
            missing.append(at)
            at = at.parent
            yield WorkStep.DONE
        while missing:
            self._write([missing.pop()])
            yield WorkStep.DONE

    def _missing(self, entry: Entry) -> list[Entry]:
        """The block and those right before it that are not below, the first one first."""
        missing: list[Entry] = []
        at: Entry | None = entry
        while at is not None and len(missing) <= MAX_BEFORE and (at is entry or not self._safe(at)):
            missing.append(at)
            at = at.parent
        return missing[::-1]

    def _safe(self, entry: Entry) -> bool:
        """It is in the tier, or on its way there, or in one above it. Or it was, and the tier has let it go since: it
        is not written a second time, so a tier that is too small is not worn by the same blocks again and again; and
        one that was promoted is not written back behind a clear, which drops it here last."""
        number = self._level.number
        was_here = 0 <= entry.source <= number or entry.written >> number & 1
        return bool(was_here) or entry in self._level.writes.owed or self._tier.lookup(entry.id)

    def _write(self, entries: Iterable[Entry]) -> None:
        # not one that is being filled, or left meanwhile
        self._level.write([entry for entry in entries if entry.state is BlockState.RESIDENT])
