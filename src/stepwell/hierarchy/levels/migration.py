"""Moves of blocks between the arena and the levels below it that no request waits for: writes, and blocks that are
fetched ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.core import Callback, Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.prefetch import Prefetch
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.levels.writer import Writer
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.session import Session
from stepwell.policies.writing.base import WritePolicy


class Migration:
    """`prefetch` is None while nothing is fetched ahead."""

    def __init__(
        self,
        core: Core,
        arena: Arena,
        slabs: SlabPool,
        stack: Stack,
        canaries: CanaryJudge,
        write: WritePolicy,
        *,
        prefetch: bool,
    ) -> None:
        self._core = core
        self._arena = arena
        self._stack = stack
        self._canaries = canaries
        self._writers = [Writer(core, arena, slabs, level, write) for level in stack.levels]
        self.prefetch = self._prefetch() if prefetch else None
        self._ending = False

    def _prefetch(self) -> Prefetch:
        return Prefetch(self._core, self._arena, self._stack, self._canaries)

    def follow(self, write: WritePolicy, *, prefetch: bool) -> None:
        """Puts this write policy in force, and fetches blocks ahead or not. What was fetched ahead stays in host memory
        like any other block."""
        for writer in self._writers:
            writer.follow(write)
        if not prefetch:
            self.prefetch = None
        elif self.prefetch is None:
            self.prefetch = self._prefetch()

    def spills_resumed(self) -> None:
        """Spills are paused no more."""
        for writer in self._writers:
            writer.resumed()

    # what happens to blocks -------------------------------------------------------------------------------------------

    def asked(self, session: Session, epoch: int, digests: bytes) -> None:
        """A request of this session has asked for these blocks, at this epoch of its weights."""
        if self.prefetch is not None:
            self.prefetch.asked(session, session.origins(epoch)[0], digests)

    def spilled(self, run: Sequence[Entry]) -> None:
        """These blocks have just been published."""
        for writer in self._writers:
            writer.spilled(run)
        if self.prefetch is not None:
            for entry in run:
                self.prefetch.spilled(entry)

    def promoted(self, entry: Entry) -> None:
        """The block has just been promoted: levels above the one that it came from may want it, until the well ends."""
        if self._ending:
            return
        for writer in self._writers[: entry.source]:
            writer.promoted(entry)

    def used(self, run: Sequence[Entry], again: Sequence[Entry]) -> None:
        """A request uses the blocks of this run, in the order of its prompt; those of `again` were in host memory
        already."""
        for writer in self._writers:
            writer.used(run, again)
        if self.prefetch is not None:
            self.prefetch.used(run)

    def left(self, entry: Entry, *, evicted: bool) -> None:
        """The block has gone from host memory; `evicted` if its place was needed."""
        if self.prefetch is not None:
            self.prefetch.left(entry)
        if evicted:
            for writer in self._writers:
                writer.left(entry)

    def cleared(self, namespace: bytes) -> None:
        """A tier is being cleared of this namespace, by its tag; of all, if it is empty."""
        if self.prefetch is not None:
            self.prefetch.forget(namespace)

    # time -------------------------------------------------------------------------------------------------------------

    @property
    def next_moment(self) -> float | None:
        """When time alone gives `turn` something to do; None: never."""
        return self.prefetch.next_moment if self.prefetch is not None else None

    def turn(self) -> None:
        """Writes and fetches ahead a little. Called often."""
        for writer in self._writers:
            writer.turn()
        if self.prefetch is not None:
            self.prefetch.turn()

    # a life's end -----------------------------------------------------------------------------------------------------

    def drain(self, done: Callback) -> None:
        """Writes what is still to be written; `done` is called when each tier has it in its best form."""
        self._ending = True
        left = set(self._stack.levels)
        if not left:
            done()

        def settled(level: Level) -> None:
            left.discard(level)
            if not left:
                done()

        for writer, level in zip(self._writers, self._stack.levels, strict=True):
            writer.end(partial(level.settle, partial(settled, level)))
