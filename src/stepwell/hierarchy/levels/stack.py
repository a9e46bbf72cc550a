"""What lies below the arena: the tier with its queue and its costs, and what is written to it and fetched from it ahead
of need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.entry import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.costs import Costs
from stepwell.hierarchy.levels.mover import Mover
from stepwell.hierarchy.levels.prefetch import Prefetch
from stepwell.hierarchy.levels.writing import Writing
from stepwell.hierarchy.sessions.canaries import Canaries
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Session
from stepwell.policies.writing.base import WritePolicy
from stepwell.tiers.base import Tier


class TierStack:
    """`prefetch` is None while nothing is fetched ahead."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        tier: Tier,
        sealing: Sealing,
        canaries: Canaries,
        costs: Costs,
        write: WritePolicy,
        *,
        prefetch: bool,
    ) -> None:
        self._core = core
        self._arena = arena
        self._canaries = canaries
        self.costs = costs
        self.mover = Mover(core, arena, tier, sealing, costs)
        self._writing = Writing(core, arena, self.mover, write)
        self.prefetch = self._prefetch() if prefetch else None

    def _prefetch(self) -> Prefetch:
        return Prefetch(self._core, self._arena, self.mover, self.costs, self._canaries)

    def follow(self, write: WritePolicy, *, prefetch: bool) -> None:
        """From now on this policy says what is written when, and blocks are fetched ahead or not. What was fetched
        ahead is host memory's, like any other block."""
        self._writing.follow(write)
        if not prefetch:
            self.prefetch = None
        elif self.prefetch is None:
            self.prefetch = self._prefetch()

    def spills_resumed(self) -> None:
        """Spills are paused no more."""
        self._writing.resumed()

    # what happens to blocks -------------------------------------------------------------------------------------------

    def asked(self, session: Session, epoch: int, digests: bytes) -> None:
        """A request of this session has asked for these blocks, at this epoch of its weights."""
        if self.prefetch is not None:
            self.prefetch.asked(session, session.origins(epoch)[0], digests)

    def spilled(self, entry: Entry) -> None:
        """The block has just been published."""
        self._writing.spilled(entry)
        if self.prefetch is not None:
            self.prefetch.spilled(entry)

    def used(self, run: Sequence[Entry]) -> None:
        """A request was told of these blocks, in the order of its prompt."""
        self._writing.used(run)
        if self.prefetch is not None:
            self.prefetch.used(run)

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """The block has gone from host memory; `evicted` if its place was needed."""
        if self.prefetch is not None:
            self.prefetch.left(entry)
        if evicted:
            self._writing.left(entry)

    def cleared(self, namespace: bytes) -> None:
        """The tier is being cleared of this namespace, by its tag; of all, if it is empty."""
        if self.prefetch is not None:
            self.prefetch.forget(namespace)

    # time -------------------------------------------------------------------------------------------------------------

    @property
    def next_moment(self) -> float | None:
        """When `turn` has something to do because of the time alone."""
        guess = self.prefetch.next_moment if self.prefetch is not None else None
        moments = [moment for moment in (self.mover.next_moment, guess) if moment is not None]
        return min(moments, default=None)

    def pump_due(self) -> None:
        """Reads and writes whose time has come begin. Before slabs are retired: what is being written is leased."""
        if (due := self.mover.next_moment) is not None and due <= self._core.clock.now():
            self.mover.pump()

    def turn(self) -> None:
        """A little of what is written or fetched ahead. Called often."""
        self._writing.turn()
        if self.prefetch is not None:
            self.prefetch.turn()

    # a life's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tier, in the background. Call once, at first."""
        self.mover.recover()

    def drain(self, done: Callable[[], None]) -> None:
        """What is still to be written is written, and `done` is called when the tier has it in its best form."""
        self._writing.end(lambda: self.mover.when_idle(lambda: self.mover.tier.settle(done)))

    def close(self) -> None:
        """Frees what the process holds for the tier. No job may be running any more."""
        self.mover.tier.close()
