"""One tier's place below the arena: its writes and reads, and whether it is asked at all.

    down   write   ──► writes ──► tier
    up     promote ──► reads  ──► tier ──► arena

Reads go before writes: while some came lately, little is written at a time, and they have threads of their own. A tier
that hangs or fails is asked for nothing more until it works again. Reads and writes have a breaker each: writes may
wait for other things than a device (a recovery, room), so they stop no reads. What a tier cannot be read for now, a
level further below may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.block.tier import Figures
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Callback, Core
from stepwell.hierarchy.levels.breaker import Breaker, State
from stepwell.hierarchy.levels.reads import MAX_BATCH, Lower, ReadQueue
from stepwell.hierarchy.levels.speed import allowance_s
from stepwell.hierarchy.levels.writes import AHEAD_S, NEAR_S, WRITERS, WriteQueue
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Session
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.turns import UNAWAITED, RequestTurn, Turns
from stepwell.tiers.base import SharedTier, Tier

CALM_S = 1.0
"""Seconds without a read after which writes take the whole tier."""


class Level:
    """`number`: its place in the stack, 0 right below the arena. `lower`: the level below it, None for the last."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        tier: Tier,
        sealing: Sealing,
        number: int,
        turns: Turns,
        lower: Lower | None = None,
    ) -> None:
        self._arena = arena
        self._index = core.index
        self._news = core.news
        self._clock = core.clock
        self._emit = core.emit
        self.tier = tier
        self._shared = tier if isinstance(tier, SharedTier) else None
        self.number = number
        self._lower = lower
        self._reads_breaker = Breaker(core.clock, partial(self._moved, "read"))
        self._writes_breaker = Breaker(core.clock, partial(self._moved, "write"))
        self.reads = ReadQueue(core, arena, tier, sealing, self._reads_breaker, turns, lower)
        self.writes = WriteQueue(core, arena, tier, sealing, self._writes_breaker, number)
        self.recovering = False  # the tier looks for what an earlier life left: writes would only wait in it
        self._moves = False  # a breaker has moved since the last `pump`
        self._when_idle: Callback | None = None

    # looking ----------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.tier.name

    @property
    def shared(self) -> bool:
        """True if others write to the tier too, so that it may have more than is known."""
        return self._shared is not None

    @property
    def keeps(self) -> bool:
        """The tier keeps blocks."""
        return self.tier.capacity().limit > 0

    def takes(self, nbytes: int) -> bool:
        """The tier would soon have written a block of so many bytes that passes through host memory."""
        return self.keeps and not self.recovering and self.writes.takes(nbytes)

    @property
    def down(self) -> bool:
        """Nothing is read from the tier for now."""
        return self._reads_breaker.state is State.OPEN

    @property
    def at_leisure(self) -> bool:
        """True if the tier is healthy and no request waits for it."""
        return self._reads_breaker.state is State.CLOSED and not self.reads.ahead(UNAWAITED.place)

    @property
    def speed(self) -> TierSpeed | None:
        """How fast the tier is read; None until that is known."""
        return self.reads.speed.known

    def allowance_s(self, stake_s: float) -> float:
        """Seconds that a request may wait for one block in addition: as healthy reads take that long or, if giving up
        costs it `stake_s`, as late ones come often enough, unless the tier seems to hang."""
        if not self.keeps:
            return 0.0
        if self._reads_breaker.state is not State.CLOSED:
            return self.reads.healthy.slowest_s
        return allowance_s(self.reads.healthy, self.reads.late, self._reads_breaker.oldest_s, stake_s)

    @property
    def next_moment(self) -> float | None:
        """When `pump` has something to do."""
        if self._moves or self.reads.stale or self.writes.stale:
            return self._clock.now()
        breakers = (self._reads_breaker, self._writes_breaker)
        return min((moment for breaker in breakers if (moment := breaker.next_moment) is not None), default=None)

    def _moved(self, operation: str, state: State, why: str) -> None:
        self._moves = True  # any look moves it, even one that only asks for figures
        if operation == "read" and state is State.OPEN:
            self._news.tier_down = True
        self._emit(e.TierBreakerMoved(self.name, operation, state.value, why))

    def count(self) -> Figures:
        """Figures for `stats`; none of a tier that keeps nothing."""
        tier = self.tier
        capacity = tier.capacity()
        if not capacity.limit:
            return {}
        return {
            "bytes": capacity.used,
            "capacity_bytes": capacity.limit,
            "reads_up": int(not self.down),
            "writes_up": int(not self.recovering and self._writes_breaker.state is not State.OPEN),
            "write_queue_bytes": self.writes.queued_bytes,
            "staging_blocks": len(self.reads.promoting),
            "device_written_bytes": tier.counts.device_bytes,
            "evicted_blocks": tier.counts.evicted_blocks,
            "reinserted_blocks": tier.counts.reinserted_blocks,
            **tier.figures(),
            **{f"errors_{kind}": n for kind, n in list(tier.counts.errors.items())},  # any thread may add a kind
        }

    # moving blocks ----------------------------------------------------------------------------------------------------

    def write(self, entries: Sequence[Entry]) -> None:
        """These RESIDENT blocks, which the tier does not have, are to be written."""
        for entry in entries:
            self.writes.add(entry)
        if entries:
            self.pump()

    def promote(
        self,
        session: Session,
        origin: Origin,
        id: BlockId,
        parent: Entry | None,
        turn: RequestTurn,
        *,
        passing: bool = False,
        displaces: bool = True,
    ) -> Entry | None:
        """A block of the arena that is being filled from the tier; None: there is no room. `turn`: its request's, or
        UNAWAITED. `passing` and `displaces` are those of `Arena.reserve`."""
        assert session.owner is not None
        entry = self._arena.reserve(
            session.owner, id, parent, session.shards, session.copiers, passing=passing, displaces=displaces
        )
        if entry is not None:
            entry.origin = origin
            self._index.add(entry)
            entry.source = self.number
            self.reads.add(entry, turn)
            if self.reads.waiting_bytes >= MAX_BATCH:
                self.pump()
        return entry

    def take_over(self, entry: Entry, turn: RequestTurn) -> bool:
        """Promotes a block that a level above could not read, from here or from further below. False: it cannot be
        had."""
        if self.down or not self.tier.lookup(entry.id):
            return self._lower is not None and self._lower.take_over(entry, turn)
        entry.source = self.number
        self.reads.add(entry, turn)
        return True

    def probe(self, ids: Sequence[BlockId], done: Callback) -> bool:
        """Asks a tier that others write to which of these blocks it has; `done` is called when that is known. False: it
        is not asked."""
        return self._shared is not None and self.reads.probe(self._shared, ids, done)

    def pump(self) -> None:
        """Begins as many reads and writes as the tier should have. Due whenever `next_moment` says so."""
        self._moves = False
        self.reads.begin()
        may_write = not (self.down or self.recovering)
        lately = self._clock.now() - self.reads.began < CALM_S
        self.writes.begin((1 if self.reads.reading else WRITERS) if may_write else 0, NEAR_S if lately else AHEAD_S)
        if self._when_idle is not None and self.writes.idle:
            call, self._when_idle = self._when_idle, None
            call()

    # a life's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background; nothing is written before that has ended."""
        began = self._clock.now()

        def done(blocks: int) -> None:
            self.recovering = False
            self._moves = True
            kept = self.tier.figures().get("kept_segments", 0)
            self._emit(e.TierRecovered(self.name, blocks, self._clock.now() - began, kept))

        self.recovering = True
        self.tier.recover(done)

    def settle(self, done: Callback) -> None:
        """Calls back once, when everything that was to be written is and the tier has it in its best form."""
        self._when_idle = lambda: self.tier.settle(done)
        self.pump()
