"""Blocks on their way from one tier into the arena.

    add ──► heap by turns of requests, then place in the prompt ──► batches of up to 8 MiB ──► tier ──► RESIDENT
                                                                                                 │
                                           failed: the level below reads it, if it has the block ◄─┘

A block that is being promoted is FILLING and belongs to the job that opens it alone. Nothing waits for the tier:
how long a request may wait is its client's matter.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Protocol

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Callback, Core
from stepwell.hierarchy.levels.breaker import OVERDUE_S, Breaker, verdict
from stepwell.hierarchy.levels.speed import HealthyReads, LateReads, ReadSpeed
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.policies.turns import Place, RequestTurn, Turns
from stepwell.tiers.base import Reading, SharedTier, Tier

MAX_BATCH, MIN_BATCH = 8 << 20, 2 << 20
"""Bytes of blocks in one call of the tier. Reads are cut smaller than the most where that spreads them over threads."""

AHEAD_S = 0.1
"""Seconds of reads that a tier is asked for beyond what it is doing."""

MAX_PROBES = 64
"""Probes of one tier under way at a time."""


class Lower(Protocol):
    """The level below this one."""

    def take_over(self, entry: Entry, turn: RequestTurn) -> bool:
        """Reads the block from there, or from further below. False: it cannot be had."""


class ReadQueue:
    """Reads of one tier. `breaker` says whether the tier is asked, `turns` for which request. The core's news say which
    reads have ended.

    `stale` is set when more may begin than at the last `begin`."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        tier: Tier,
        sealing: Sealing,
        breaker: Breaker,
        turns: Turns,
        lower: Lower | None,
    ) -> None:
        self._arena = arena
        self._index = core.index
        self._news = core.news
        self._clock = core.clock
        self._emit = core.emit
        self._max_reading = core.limits.readers
        self._tier = tier
        self._sealing = sealing
        self._breaker = breaker
        self._turns = turns
        self._lower = lower
        self._numbers = count(1)
        self._line: list[tuple[Place, int, Entry, RequestTurn]] = []
        self.promoting: dict[Entry, RequestTurn | None] = {}  # the first that it is wanted in; None: its read has begun
        self.waiting_bytes = 0  # of those whose read has not begun
        self._reading_bytes = 0
        self._ended = 0  # reads so far
        self.began = -inf  # when the last one did
        self._probes = 0  # under way
        self._first: dict[Entry, RequestTurn] = {}  # of those in `promoting`: that turn, also of a read that runs
        self._asked: Counter[RequestTurn] = Counter()  # bytes of those in `promoting`, by that turn
        self.reading: dict[int, list[Entry]] = {}  # by the number of the call
        self.speed = ReadSpeed(core.clock, max(1, core.limits.readers) * MAX_BATCH)
        self.healthy = HealthyReads()
        self.late = LateReads()
        self.stale = False

    # the line ---------------------------------------------------------------------------------------------------------

    def add(self, entry: Entry, turn: RequestTurn) -> None:
        """This FILLING block, which the tier has, is to be read in this turn of a request, or for none (UNAWAITED)."""
        self.promoting[entry] = self._first[entry] = turn
        self._asked[turn] += entry.nbytes
        self.waiting_bytes += entry.nbytes
        heapq.heappush(self._line, (turn.place, next(self._numbers), entry, turn))
        self.stale = True

    def hasten(self, entry: Entry, turn: RequestTurn) -> None:
        """Another request wants a block that is being promoted, perhaps earlier than the one before."""
        if turn.place >= self._first[entry].place:
            return
        self._no_more_asked(entry)
        self._first[entry] = turn
        self._asked[turn] += entry.nbytes
        if self.promoting[entry] is not None:
            self.promoting[entry] = turn
            heapq.heappush(self._line, (turn.place, next(self._numbers), entry, turn))  # the other record is skipped

    def ahead(self, place: Place) -> int:
        """Bytes that are being promoted for requests before this place in line."""
        return sum(nbytes for turn, nbytes in self._asked.items() if turn.place < place)

    def waits(self, entry: Entry) -> bool:
        """The block is being promoted, and its read has not begun."""
        return self.promoting.get(entry) is not None

    def unwanted(self, entry: Entry) -> None:
        """No request waits for this block any more: if its read has not begun, its slots are free at once."""
        if self.waits(entry):
            self._give_up(entry)

    def _hand_down(self, entry: Entry) -> bool:
        """False: no level below has the block, or nothing waits for it."""
        if self._lower is None or not entry.pins or not self._lower.take_over(entry, self._first[entry]):
            return False
        self._leave(entry)
        self._index.add(entry)  # it may have been disowned
        self._news.landed.append(entry)  # requests that wait for it learn what the other level allows
        return True

    def _give_up(self, entry: Entry) -> None:
        """Its promotion ends without a block."""
        self._leave(entry)
        self._index.remove(entry)
        self._arena.fail(entry, quarantine=False)

    def _leave(self, entry: Entry) -> None:
        if self.promoting.pop(entry) is not None:
            self.waiting_bytes -= entry.nbytes
        self._no_more_asked(entry)

    def _no_more_asked(self, entry: Entry) -> None:
        turn = self._first.pop(entry)
        self._asked[turn] -= entry.nbytes
        if not self._asked[turn]:
            del self._asked[turn]

    # reading ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gives the tier as much to read as it should have."""
        self.stale = False
        while self._breaker.admits and self._line and len(self.reading) < self._max_reading:
            if self.reading and self._reading_bytes >= self.in_flight:
                break
            self._read()

    def _read(self) -> None:
        most = min(max(MIN_BATCH, min(MAX_BATCH, self.waiting_bytes // self._max_reading)), self.in_flight // 2)
        batch: list[Entry] = []
        nbytes = 0
        while self._line and (not batch or nbytes < most):
            _, _, entry, turn = heapq.heappop(self._line)
            if self.promoting.get(entry) is turn:
                self.promoting[entry] = None
                self._turns.served(turn, entry.nbytes)
                self.waiting_bytes -= entry.nbytes
                batch.append(entry)
                nbytes += entry.nbytes
        if not batch:
            return
        number, began = next(self._numbers), self._clock.now()
        self.began = began
        self.reading[number] = batch
        self._reading_bytes += nbytes
        beside = len(self.reading)
        self._breaker.began(number)

        def done(answers: list[Reading]) -> None:
            side_by_side = (beside + len(self.reading)) / 2
            del self.reading[number]
            self._reading_bytes -= nbytes
            self._ended += 1
            failed = all(answer is Reading.FAILED for answer in answers)
            self._breaker.ended(number, verdict(not failed, failed))
            seconds = self._clock.now() - began
            self.late.took(seconds, good=Reading.GOOD in answers)
            if seconds <= OVERDUE_S and Reading.GOOD in answers:
                self.healthy.took(seconds)
            good = sum(self._ended_one(entry, answer) for entry, answer in zip(batch, answers, strict=True))
            if good == nbytes:
                self.speed.read(nbytes, seconds, side_by_side)
            hits = sum(answer is Reading.GOOD for answer in answers)
            self._emit(e.BlocksStaged(self._tier.name, hits, good, seconds))
            self.stale = True

        self._tier.read([self._sealing.incoming(entry) for entry in batch], done)

    def _ended_one(self, entry: Entry, answer: Reading) -> int:
        """Bytes of the block that are in the arena from now on."""
        if answer is Reading.GOOD and self._index.add(entry):
            self._leave(entry)
            self._arena.commit(entry)
            self._news.landed.append(entry)
            return entry.nbytes
        found = self._index.find(entry.id)
        superseded = found is not None and found is not entry  # it was filled anew meanwhile
        if superseded or not self._hand_down(entry):
            self._give_up(entry)
            self._news.landed.append(entry)
        self._emit(e.BlockNotRead(self._tier.name, "superseded" if answer is Reading.GOOD else answer.value))
        return 0

    def probe(self, tier: SharedTier, ids: Sequence[BlockId], done: Callback) -> bool:
        """Asks the tier which of these blocks it has, as a call that its breaker watches; `done` is called when it has
        answered. False: it is not asked, since it is down or asked a lot already."""
        if not self._breaker.admits or self._probes == MAX_PROBES:
            return False
        number = next(self._numbers)
        self._probes += 1
        self._breaker.began(number)

        def answered(found: Reading) -> None:
            self._probes -= 1
            self._breaker.ended(number, verdict(False, found is Reading.FAILED))  # a good one says nothing of reads
            done()

        tier.probe(ids, answered)
        return True

    @property
    def in_flight(self) -> int:
        """Bytes that the tier is asked for at a time: what it reads in about AHEAD_S. If more were asked of a slow
        tier, all of it would land late and at once, and to requests the tier would seem to hang. While its speed is not
        known, twice as much with each read that has ended."""
        speed = self.speed.known
        most = MAX_BATCH * self._max_reading
        if speed is None:
            return min(most, MIN_BATCH << min(self._ended, 16))
        return int(min(most, (AHEAD_S + speed.latency_s) / max(speed.byte_s, 1e-15)))
