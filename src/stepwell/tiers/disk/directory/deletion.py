"""Deleting segment files, one at a time, each once no job uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stepwell.tiers.base import Forgotten
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.segment import Segment, SegmentPhase


class Deletion:
    """Deletes segments of one directory. The blocks of a segment have to leave the index first, one by one, so segments
    are deleted one at a time: no call pays for all of them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._going: deque[Segment] = deque()  # no job uses them
        self._running = False
        self._doomed = 0
        self._left: list[Segment] = []  # files that could not be deleted: they still take space
        self._gone = Forgotten()  # deleted since there was last nothing to delete
        self._when_done: list[Callable[[Forgotten], None]] = []

    def doom(self, segment: Segment) -> None:
        """The segment's blocks count as gone from now on; its file is deleted once no job uses it (see `go`)."""
        segment.phase = SegmentPhase.DOOMED
        self._doomed += 1
        self._directory.space.leaving += segment.nbytes
        if not segment.busy:
            self.go(segment)

    def go(self, segment: Segment) -> None:
        """No job uses this DOOMED segment any more."""
        self._going.append(segment)
        self._next()

    def again(self) -> None:
        """Tries again to delete files that could not be deleted: a later life would find the blocks in them."""
        left, self._left = self._left, []
        for segment in left:
            self.doom(segment)

    def when_done(self, done: Callable[[Forgotten], None]) -> None:
        """Calls `done`, never from inside this call, once no segment is DOOMED and deletions would survive a power cut.
        It gets what was deleted since the last such moment; not whole if any file could not be deleted, whenever that
        was."""
        self._when_done.append(done)
        self._tell()

    def _next(self) -> None:
        if self._running or not self._going:
            return
        segment, directory = self._going.popleft(), self._directory
        self._running = True  # from here on no block of it enters the index
        self._gone += Forgotten(directory.shared.index.drop_segment(segment.number))
        directory.handles.forget(segment.name)

        def gone(error: BaseException | None) -> None:
            self._running = False
            self._doomed -= 1
            space = directory.space
            space.leaving -= segment.nbytes
            if error is None or isinstance(error, FileNotFoundError):
                space.used -= segment.nbytes
                self._gone += Forgotten(nbytes=segment.nbytes)
            else:
                directory.shared.trouble("delete", error)
                self._left.append(segment)
            directory.forget(segment)
            self._next()
            self._tell()
            directory.wake()

        directory.shared.executor.submit(partial(directory.files.unlink, segment.name), gone)

    def _tell(self) -> None:
        if self._doomed:
            return
        forgotten, self._gone = replace(self._gone, whole=not self._left), Forgotten()
        waiting, self._when_done = self._when_done, []
        shared = self._directory.shared

        def synced(error: BaseException | None) -> None:
            if error is not None:
                shared.trouble("delete", error)
            for done in waiting:
                done(replace(forgotten, whole=forgotten.whole and error is None))

        if waiting:
            shared.executor.submit(self._directory.files.sync, synced)
