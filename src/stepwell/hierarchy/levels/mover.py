"""Moves blocks between the arena and the tier below it: writes what it is told to, stages what is asked for.

    down   write ──► queue, bounded in bytes ──► batches of up to 8 MiB ──► tier
    up     a ticket wants it ──► heap by the engine's queue, then place in the prompt ──► batches ──► tier ──► landed

A block that waits to be written is leased, so that it stays, up to `queue_bytes` of them; beyond that it waits as long
as nobody needs its slots. One that is being staged is FILLING and belongs to nobody but the job that opens it. Reads go
before writes. Nothing waits for the tier: how long a request may wait is its client's matter, and a tier that hangs or
fails is asked for nothing more until it works again. Reads and writes have a breaker each: writes may wait for other
things than a device (a recovery, room), so they stop no reads.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from itertools import count

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.block.state import State
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.entry import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.breaker import OVERDUE_S, Breaker, Verdict
from stepwell.hierarchy.levels.breaker import State as Circuit
from stepwell.hierarchy.levels.costs import Costs
from stepwell.hierarchy.levels.healthy import HealthyReads
from stepwell.hierarchy.origin import Origin
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Session
from stepwell.policies.placement.base import Place
from stepwell.tiers.base import Reading, Tier, Writing

MOST_BATCH, LEAST_BATCH = 8 << 20, 2 << 20
"""Bytes of blocks in one call of the tier. Reads are cut smaller than the most where that spreads them over threads."""

AHEAD_S = 0.1
"""Of reads that a tier is asked for beyond what it is doing."""

NOBODYS = 1 << 62
"""The place in line of what no request waits for."""

WRITERS = 4
"""Batches being written at the same time; one while anything is being read."""


class Mover:
    """`stored` counts blocks that writes have stored. The core's news say which reads have ended, that leases of
    written blocks have, and when the tier stops being read."""

    def __init__(self, core: Core, arena: Arena, tier: Tier, sealing: Sealing, costs: Costs) -> None:
        self._arena = arena
        self._index = core.index
        self._news = core.news
        self.tier = tier
        self._sealing = sealing
        self._clock = core.clock
        self._limits = core.limits
        self._emit = core.emit
        self._costs = costs
        self.stored = 0
        self._numbers = count(1)
        self._down: deque[tuple[Entry, bool]] = deque()  # and whether we hold a lease of it
        self.owed: set[Entry] = set()  # waiting to be written, or being written
        self.queued_bytes = 0  # of them
        self._leased_bytes = 0  # of them, those that are leased
        self._up: list[tuple[int, int, Entry]] = []
        self.staging: dict[Entry, int | None] = {}  # the smallest order it is wanted for; None: its read has begun
        self._up_bytes = 0  # of those whose read has not
        self._reading_bytes = 0
        self._ended = 0  # reads so far
        self._orders: dict[Entry, int] = {}  # of those in `staging`: the smallest order it was wanted for at its read
        self._asked: Counter[int] = Counter()  # bytes of those in `staging`, by that order
        self.writing: dict[int, list[Entry]] = {}  # by the number of the call
        self.reading: dict[int, list[Entry]] = {}
        self._reads, self._writes = (Breaker(core.clock, self._moved(operation)) for operation in ("read", "write"))
        self.recovering = False  # the tier looks for what an earlier life left: writes would only wait in it
        self._when_idle: Callable[[], None] | None = None
        self._moves = False  # a breaker admits more than at the last `pump`
        self._healthy = HealthyReads()

    # looking ----------------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """There is a tier below that keeps blocks."""
        return self.tier.capacity().limit > 0

    @property
    def down(self) -> bool:
        """Nothing is read from the tier for now."""
        return self._reads.state is Circuit.OPEN

    @property
    def at_leisure(self) -> bool:
        """The tier is well, and no request waits for it."""
        return self._reads.state is Circuit.CLOSED and not self.ahead(NOBODYS)

    @property
    def next_moment(self) -> float | None:
        """When `pump` has something to do because of the time alone."""
        if self._moves:
            return self._clock.now()
        moments = [moment for moment in (self._reads.next_moment, self._writes.next_moment) if moment is not None]
        return min(moments, default=None)

    def _moved(self, operation: str) -> Callable[[Circuit, str], None]:
        def moved(state: Circuit, why: str) -> None:
            if state is not Circuit.OPEN:  # whoever looks first moves it: who asks for figures, say, and does no more
                self._moves = True
            elif operation == "read":
                self._news.tier_down = True
            self._emit(e.TierBreakerMoved(self.tier.name, operation, state.value, why))

        return moved

    @property
    def allowance_s(self) -> float:
        """What a request may wait for one block in addition, since healthy reads take that long: seconds."""
        return self._healthy.slowest_s if self.keeps else 0.0

    @property
    def idle(self) -> bool:
        """Everything that was to be written is, or was given up."""
        return not (self._down or self.writing)

    @property
    def leased(self) -> list[Entry]:
        """Entries that this holds a lease of, for the audit."""
        queued = (entry for entry, held in self._down if held)
        return [*queued, *(entry for entries in self.writing.values() for entry in entries)]

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background; nothing is written before that has ended."""
        began = self._clock.now()

        def done(blocks: int) -> None:
            self.recovering = False
            self.pump()
            kept = self.tier.figures().get("kept_segments", 0)
            self._emit(e.TierRecovered(self.tier.name, blocks, self._clock.now() - began, kept))

        self.recovering = True
        self.tier.recover(done)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Calls back once, when everything that was to be written is."""
        self._when_idle = call
        self.pump()

    def count(self) -> dict[str, int | float | str]:
        """For `stats`: keys begin with the tier's name. Nothing where there is no tier."""
        tier = self.tier
        capacity = tier.capacity()
        if not capacity.limit:
            return {}
        table: dict[str, int | float | str] = {
            "bytes": capacity.used,
            "capacity_bytes": capacity.limit,
            "reads_up": int(not self.down),
            "writes_up": int(not self.recovering and self._writes.state is not Circuit.OPEN),
            "write_queue_bytes": self.queued_bytes,
            "staging_blocks": len(self.staging),
            "device_written_bytes": tier.counts.device_bytes,
            "evicted_blocks": tier.counts.evicted_blocks,
            "reinserted_blocks": tier.counts.reinserted_blocks,
            **tier.figures(),
            **{f"errors_{kind}": n for kind, n in list(tier.counts.errors.items())},  # any thread may add a kind
        }
        return {f"{tier.name}_{key}": value for key, value in table.items()}

    # down -------------------------------------------------------------------------------------------------------------

    def write(self, entry: Entry) -> None:
        """This RESIDENT block, which the tier does not have, is to be written."""
        if entry in self.owed:
            return
        if self.queued_bytes + entry.nbytes > self._limits.host_bytes:
            self._emit(e.BlockNotWritten(self.tier.name, "queue_full"))
            return
        self.owed.add(entry)
        self.queued_bytes += entry.nbytes
        held = self._leased_bytes + entry.nbytes <= self._limits.queue_bytes
        if held:
            self._hold(entry)
        self._down.append((entry, held))
        self.pump()

    def _hold(self, entry: Entry) -> None:
        self._arena.lease(entry)
        self._leased_bytes += entry.nbytes

    def _write(self) -> None:
        batch: list[Entry] = []
        nbytes = 0
        while self._down and (not batch or nbytes + self._down[0][0].nbytes <= MOST_BATCH):
            entry, held = self._down.popleft()
            if entry.state is State.RESIDENT:
                if not held:
                    self._hold(entry)
                batch.append(entry)
                nbytes += entry.nbytes
            else:
                self._emit(e.BlockNotWritten(self.tier.name, "gone"))
                self._let_go(entry, held=held)
        if not batch:
            return
        number, began = next(self._numbers), self._clock.now()
        self.writing[number] = batch
        self._writes.began(number)

        def done(answers: list[Writing]) -> None:
            del self.writing[number]
            self._writes.ended(number, _said(Writing.STORED in answers, Writing.FAILED in answers))
            stored = [entry for entry, answer in zip(batch, answers, strict=True) if answer is Writing.STORED]
            for entry, answer in zip(batch, answers, strict=True):
                self._let_go(entry, held=True)
                if answer is Writing.STORED:
                    entry.written = True
                else:
                    self._emit(e.BlockNotWritten(self.tier.name, answer.value))
            seconds = self._clock.now() - began
            self._emit(e.BlocksWritten(self.tier.name, len(stored), sum(s.nbytes for s in stored), seconds))
            self.stored += len(stored)
            self._news.freed = True
            self.pump()

        self.tier.write([self._sealing.outgoing(entry) for entry in batch], done)

    def _let_go(self, entry: Entry, *, held: bool) -> None:
        self.owed.remove(entry)
        self.queued_bytes -= entry.nbytes
        if held:
            self._leased_bytes -= entry.nbytes
            self._arena.release(entry)

    # up ---------------------------------------------------------------------------------------------------------------

    def fill(self, session: Session, origin: Origin, id: BlockId, parent: Entry | None, order: int) -> Entry | None:
        """A block of the arena that is being filled from the tier; None: there is no room. `order`: its request's place
        in the engine's queue, or NOBODYS."""
        assert session.owner is not None
        owner, shards = session.owner, session.shards
        passing = False
        if order != NOBODYS:
            passing = self._arena.place(owner, id, shards, below=True) is not Place.HOT
        entry = self._arena.reserve(owner, id, parent, shards, session.copiers, passing=passing)
        if entry is not None:
            entry.origin = origin
            self._index.add(entry)
            self._stage(entry, order)
        return entry

    def _stage(self, entry: Entry, order: int) -> None:
        entry.staged = True
        self.staging[entry] = self._orders[entry] = order
        self._asked[order] += entry.nbytes
        self._up_bytes += entry.nbytes
        heapq.heappush(self._up, (order, next(self._numbers), entry))
        if self._up_bytes >= MOST_BATCH:
            self.pump()

    def hasten(self, entry: Entry, order: int) -> None:
        """Another request wants a block that is being staged, perhaps earlier than the one before."""
        before = self.staging.get(entry)
        if before is not None and order < before:
            self._no_more_asked(entry)
            self.staging[entry] = self._orders[entry] = order
            self._asked[order] += entry.nbytes
            heapq.heappush(self._up, (order, next(self._numbers), entry))  # the other record is skipped

    def ahead(self, order: int) -> int:
        """Bytes that are being staged for requests before this place in line."""
        return sum(nbytes for place, nbytes in self._asked.items() if place < order)

    def _no_more_asked(self, entry: Entry) -> None:
        order = self._orders.pop(entry)
        self._asked[order] -= entry.nbytes
        if not self._asked[order]:
            del self._asked[order]

    def unwanted(self, entry: Entry) -> None:
        """No request waits for this block any more: if its read has not begun, its slots are free at once."""
        if self.staging.get(entry) is not None:
            self._give_up(entry)

    def disown(self, entry: Entry) -> bool:
        """If this entry is to come from a tier that is down, it is found no more: who asks is told at once, and who has
        the block may fill another one. Its slots stay with the read."""
        stuck = self.down and entry in self.staging
        if stuck:
            self._index.remove(entry)
        return stuck

    def _give_up(self, entry: Entry) -> None:
        """Its staging ends without a block."""
        if self.staging.pop(entry) is not None:
            self._up_bytes -= entry.nbytes
        self._no_more_asked(entry)
        self._index.remove(entry)
        self._arena.fail(entry, quarantine=False)

    def _read(self) -> None:
        most = min(max(LEAST_BATCH, min(MOST_BATCH, self._up_bytes // self._limits.readers)), self._in_flight() // 2)
        batch: list[Entry] = []
        nbytes = 0
        while self._up and (not batch or nbytes < most):
            order, _, entry = heapq.heappop(self._up)
            if self.staging.get(entry) == order:
                self.staging[entry] = None
                self._up_bytes -= entry.nbytes
                batch.append(entry)
                nbytes += entry.nbytes
        if not batch:
            return
        number, began = next(self._numbers), self._clock.now()
        self.reading[number] = batch
        self._reading_bytes += nbytes
        beside = len(self.reading)
        self._reads.began(number)

        def done(answers: list[Reading]) -> None:
            side_by_side = (beside + len(self.reading)) / 2
            del self.reading[number]
            self._reading_bytes -= nbytes
            self._ended += 1
            failed = all(answer is Reading.FAILED for answer in answers)
            self._reads.ended(number, _said(not failed, failed))
            seconds = self._clock.now() - began
            if seconds <= OVERDUE_S and Reading.GOOD in answers:
                self._healthy.took(seconds)
            good = 0
            for entry, answer in zip(batch, answers, strict=True):
                if answer is Reading.GOOD and self._index.add(entry):
                    del self.staging[entry]
                    self._no_more_asked(entry)
                    self._arena.commit(entry)
                    good += entry.nbytes
                else:
                    self._give_up(entry)
                    reason = "superseded" if answer is Reading.GOOD else answer.value  # it was filled anew meanwhile
                    self._emit(e.BlockNotRead(self.tier.name, reason))
            if good == nbytes:
                self._costs.read(nbytes, seconds, side_by_side)
            hits = sum(answer is Reading.GOOD for answer in answers)
            self._emit(e.BlocksStaged(self.tier.name, hits, good, seconds))
            self._news.landed += batch
            self.pump()

        self.tier.read([self._sealing.incoming(entry) for entry in batch], done)

    def _in_flight(self) -> int:
        """Bytes that the tier is asked for at a time: what it brings in about AHEAD_S. Asked for more, a slow one would
        bring everything late and at once: who waits would see nothing land, and it would pass for one that hangs. As
        long as its speed is not known, twice as much with each read that ended."""
        speed = self._costs.speed
        most = MOST_BATCH * self._limits.readers
        if speed is None:
            return min(most, LEAST_BATCH << min(self._ended, 16))
        return int(min(most, (AHEAD_S + speed.latency_s) / max(speed.byte_s, 1e-15)))

    def pump(self) -> None:
        """Gives the tier as much to do as it should have. Whatever lets it do more calls this, time among it."""
        self._moves = False
        while self._reads.admits and self._up and len(self.reading) < self._limits.readers:
            if self.reading and self._reading_bytes >= self._in_flight():
                break
            self._read()
        if not self.down and not self.recovering:
            while self._writes.admits and self._down and len(self.writing) < (1 if self.reading else WRITERS):
                self._write()
        if self._when_idle is not None and self.idle:
            call, self._when_idle = self._when_idle, None
            call()


def _said(answered: bool, failed: bool) -> Verdict:
    return Verdict.ANSWERED if answered else Verdict.FAILED if failed else Verdict.NOTHING
