"""Files that go: one after the other, each as soon as nobody uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from stepwell.io.executor import Executor
from stepwell.io.files import Files
from stepwell.tiers.base import Forgotten
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.segment import Handles, Phase, Segment
from stepwell.tiers.disk.space import Space


class Owner(Protocol):
    """What a deletion needs of the directory whose files go."""

    files: Files
    handles: Handles
    space: Space

    def forget(self, segment: Segment) -> None: ...

    def trouble(self, kind: str, error: BaseException, /) -> None: ...

    def wake(self) -> None: ...


class Deletion:
    """Deletes segments of one directory. What a file held has to be looked up in the index first, block by block: so
    one goes at a time, and nobody waits for all of them."""

    def __init__(self, owner: Owner, index: BlockIndex, executor: Executor) -> None:
        self._owner = owner
        self._index = index
        self._executor = executor
        self._going: deque[Segment] = deque()  # used by nobody
        self._running = False
        self._doomed = 0
        self._left: list[Segment] = []  # files that could not be deleted: they lie there still, and count
        self._gone = Forgotten()  # since there was last nothing to do
        self._when_done: list[Callable[[Forgotten], None]] = []

    def doom(self, segment: Segment) -> None:
        """Its blocks count as gone from now on, and its file goes when nobody uses it any more (see `go`)."""
        segment.phase = Phase.DOOMED
        self._doomed += 1
        self._owner.space.leaving += segment.nbytes
        if not segment.busy:
            self.go(segment)

    def go(self, segment: Segment) -> None:
        """Nobody uses this DOOMED segment any more."""
        self._going.append(segment)
        self._next()

    def again(self) -> None:
        """Files that could not be deleted go after all, if they can now: a next life would find what they hold."""
        left, self._left = self._left, []
        for segment in left:
            self.doom(segment)

    def when_done(self, done: Callable[[Forgotten], None]) -> None:
        """Tells what went, when all that is doomed now or until then is gone for good; not whole if any file is left
        that could not be deleted, whenever that was. Never inside this call."""
        self._when_done.append(done)
        self._tell()

    def _next(self) -> None:
        if self._running or not self._going:
            return
        segment = self._going.popleft()
        self._running = True  # from here on nothing puts a block of it into the index
        self._gone += Forgotten(self._index.drop_segment(segment.number))
        self._owner.handles.forget(segment.name)

        def gone(error: BaseException | None) -> None:
            self._running = False
            self._doomed -= 1
            space = self._owner.space
            space.leaving -= segment.nbytes
            if error is None or isinstance(error, FileNotFoundError):
                space.used -= segment.nbytes
                self._gone += Forgotten(nbytes=segment.nbytes)
            else:
                self._owner.trouble("delete", error)
                self._left.append(segment)
            self._owner.forget(segment)
            self._next()
            self._tell()
            self._owner.wake()

        self._executor.submit(partial(self._owner.files.unlink, segment.name), gone)

    def _tell(self) -> None:
        if self._doomed:
            return
        forgotten, self._gone = replace(self._gone, whole=not self._left), Forgotten()
        waiting, self._when_done = self._when_done, []

        def synced(error: BaseException | None) -> None:
            if error is not None:
                self._owner.trouble("delete", error)
            for done in waiting:
                done(replace(forgotten, whole=forgotten.whole and error is None))

        if waiting:
            self._executor.submit(self._owner.files.sync, synced)
