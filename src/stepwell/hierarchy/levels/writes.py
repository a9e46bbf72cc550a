"""Blocks on their way from the arena to one tier.

    add ──► queue, bounded in bytes ──► batches of up to 8 MiB ──► tier

A block that waits to be written is leased, so that it stays, up to `queue_bytes` of them; beyond that it waits as long
as nothing needs its slots. One that passes through host memory is always leased: `takes` says when there is room for
it.

What the tier is asked to write at a time, a read that arrives has to share the tier and the processors with. So it is
what the tier writes in AHEAD_S, and in NEAR_S while reads come now and then.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from stepwell import events as e
from stepwell.block.state import BlockState
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.breaker import Breaker, verdict
from stepwell.hierarchy.levels.reads import MAX_BATCH
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.policies.costs.transfer import TransferFit
from stepwell.tiers.base import Tier, Writing

WRITERS = 4
"""Batches being written at the same time; one while anything is being read."""

AHEAD_S, NEAR_S = 0.05, 0.003
"""Seconds of writes that a tier is asked for at a time, as fast as it has written so far; at least one batch."""


class WriteQueue:
    """Writes of one tier, the level with this `number`. `breaker` says whether the tier is asked. `stored` counts
    blocks that writes have stored. The core's news say when leases of written blocks have ended.

    `stale` is set when more may begin than at the last `begin`."""

    def __init__(self, core: Core, arena: Arena, tier: Tier, sealing: Sealing, breaker: Breaker, number: int) -> None:
        self._arena = arena
        self._news = core.news
        self._clock = core.clock
        self._limits = core.limits
        self._emit = core.emit
        self._tier = tier
        self._sealing = sealing
        self._breaker = breaker
        self._number = number
        self._numbers = count(1)
        self._line: deque[tuple[Entry, bool]] = deque()  # and whether we hold a lease of it
        self.owed: set[Entry] = set()  # waiting to be written, or being written
        self.queued_bytes = 0  # of them
        self._leased_bytes = 0  # of them, those that are leased
        self.writing: dict[int, list[Entry]] = {}  # by the number of the call
        self._writing_bytes = 0
        self._speed = TransferFit(WRITERS * MAX_BATCH)
        self.stored = 0
        self.stale = False

    @property
    def idle(self) -> bool:
        """Everything that was to be written is, or was given up."""
        return not (self._line or self.writing)

    @property
    def leased(self) -> list[Entry]:
        """Entries that this holds a lease of, for the audit."""
        queued = (entry for entry, held in self._line if held)
        return [*queued, *(entry for entries in self.writing.values() for entry in entries)]

    def add(self, entry: Entry) -> None:
        """This RESIDENT block, which the tier does not have, is to be written."""
        if entry in self.owed:
            return
        if self.queued_bytes + entry.nbytes > self._limits.host_bytes:
            self._emit(e.BlockNotWritten(self._tier.name, "queue_full"))
            return
        self.owed.add(entry)
        self.queued_bytes += entry.nbytes
        held = entry.history.passing or self._leased_bytes + entry.nbytes <= self._limits.queue_bytes
        if held:
            self._hold(entry)
        self._line.append((entry, held))
        self.stale = True

    def takes(self, nbytes: int) -> bool:
        """A block of so many bytes that passes through host memory would stay until it is written."""
        return self._breaker.admits and self._leased_bytes + nbytes <= max(self._limits.queue_bytes, nbytes)

    def begin(self, most: int, ahead_s: float = AHEAD_S) -> None:
        """Gives the tier as much to write as it should have: what it writes in `ahead_s` seconds, in at most so many
        batches at a time."""
        self.stale = False
        speed = self._speed.speed
        nbytes = WRITERS * MAX_BATCH if speed is None else int(ahead_s / max(speed.byte_s, 1e-15))
        while self._breaker.admits and self._line and len(self.writing) < most:
            if self.writing and self._writing_bytes >= nbytes:
                break
            self._write(min(MAX_BATCH, nbytes // 2))

    def _hold(self, entry: Entry) -> None:
        self._arena.lease(entry)
        self._leased_bytes += entry.nbytes

    def _write(self, most: int) -> None:
        batch: list[Entry] = []
        nbytes = 0
        while self._line and (not batch or nbytes + self._line[0][0].nbytes <= most):
            entry, held = self._line.popleft()
            if entry.state is BlockState.RESIDENT:
                if not held:
                    self._hold(entry)
                batch.append(entry)
                nbytes += entry.nbytes
            else:
                self._emit(e.BlockNotWritten(self._tier.name, "gone"))
                self._let_go(entry, held=held)
        if not batch:
            return
        number, began = next(self._numbers), self._clock.now()
        self.writing[number] = batch
        self._writing_bytes += nbytes
        beside = len(self.writing)
        self._breaker.began(number)

        def done(answers: list[Writing]) -> None:
            side_by_side = (beside + len(self.writing)) / 2
            del self.writing[number]
            self._writing_bytes -= nbytes
            self._breaker.ended(number, verdict(Writing.STORED in answers, Writing.FAILED in answers))
            stored = [entry for entry, answer in zip(batch, answers, strict=True) if answer is Writing.STORED]
            for entry, answer in zip(batch, answers, strict=True):
                self._let_go(entry, held=True)
                if answer is Writing.STORED:
                    entry.written |= 1 << self._number
                else:
                    self._emit(e.BlockNotWritten(self._tier.name, answer.value))
            seconds = self._clock.now() - began
            if len(stored) == len(batch):
                self._speed.observe(nbytes, seconds, side_by_side, self._clock.now())
            self._emit(e.BlocksWritten(self._tier.name, len(stored), sum(s.nbytes for s in stored), seconds))
            self.stored += len(stored)
            self._news.freed = True
            self.stale = True

        self._tier.write([self._sealing.outgoing(entry) for entry in batch], done)

    def _let_go(self, entry: Entry, *, held: bool) -> None:
        self.owed.remove(entry)
        self.queued_bytes -= entry.nbytes
        if held:
            self._leased_bytes -= entry.nbytes
            self._arena.release(entry)
