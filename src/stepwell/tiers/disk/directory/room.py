"""Making room: the next open segment comes from a free file, a new one, or the oldest closed one, which is emptied.

Bounds: files of ours never exceed `space.limit` bytes. No file is made or used again where others would be left less
than `space.reserve` bytes of free space; a file that became free is then deleted instead.
"""

from __future__ import annotations

import errno
import heapq
from collections import deque

from stepwell.block.layout import PAGE
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.directory.deletion import Deletion
from stepwell.tiers.disk.directory.eviction import Evictor
from stepwell.tiers.disk.directory.placing import Placing
from stepwell.tiers.disk.directory.space import NoRoom
from stepwell.tiers.disk.layout import Head
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.stream import write_bytes

EVICT_AHEAD = 0.25
"""Share of the open segment that is still free when room is made for the next one: hot blocks are copied into it."""

SUFFIX = ".seg"


class Room:
    """The free and the closed segments of one directory. `beginning`: a segment is being made ready."""

    def __init__(self, directory: Directory, placing: Placing, deletion: Deletion) -> None:
        self.beginning = False
        self.evictor = Evictor(directory, self.emptied)
        self._directory = directory
        self._placing = placing
        self._deletion = deletion
        self._free: deque[Segment] = deque()
        self._closed: list[tuple[int, int]] = []  # heap of (sequence, number): the oldest is evicted first
        self._sequence = 0

    def closed(self, segment: Segment) -> None:
        segment.phase = SegmentPhase.CLOSED
        heapq.heappush(self._closed, (segment.sequence, segment.number))

    def seen(self, sequence: int) -> None:
        """An earlier life has used this sequence number: later segments get larger ones."""
        self._sequence = max(self._sequence, sequence)

    def begin(self) -> None:
        """Makes an open segment ready, in the background; refuses the blocks that wait if there will be none. The
        segment that was open must be closed."""
        directory, space = self._directory, self._directory.space
        if directory.unreadable or space.ill:
            self._placing.refuse()
        elif not directory.ready:
            return
        elif self._free:
            self._prepare(self._free.popleft(), create=False)
        elif space.may_take(directory.segment_bytes):
            space.used += directory.segment_bytes
            shared = directory.shared
            name = f"{shared.entropy(8).hex()}{SUFFIX}"
            new = Segment(next(shared.numbers), name, b"", 0, directory.segment_bytes, SegmentPhase.BEGINNING)
            directory.enter(new)
            self._prepare(new, create=True)
        elif not self._evict():
            self._deletion.again()  # files that could not be deleted still count, and may go by now
            self._placing.refuse()

    def _prepare(self, old: Segment, *, create: bool) -> None:
        """Begins a new life of a file. It gets a new id, so that frames of an earlier life are never taken for this
        one's."""
        directory, shared = self._directory, self._directory.shared
        self.beginning = True
        old.phase = SegmentPhase.BEGINNING
        self._sequence = max(self._sequence + 1, int(shared.wall() * 1e6))
        head = Head(shared.entropy(16), self._sequence, old.nbytes, int(shared.wall()))

        def job() -> None:
            available, _ = directory.files.free()
            if available - (old.nbytes if create else 0) < directory.space.reserve:
                raise NoRoom
            if create:
                directory.files.create(old.name, old.nbytes).close()
            directory.handles.forget(old.name)  # so that a file that was deleted by others is found missing
            with directory.handles.use(old.name) as file:
                write_bytes(file, head.pack(), 0, shared.staging)

        def ended(error: BaseException | None) -> None:
            self.beginning = False
            if error is None:
                shared.counts.device_bytes += PAGE
                directory.forget(old)
                segment = Segment(next(shared.numbers), old.name, head.id, head.sequence, old.nbytes, SegmentPhase.OPEN)
                directory.enter(segment)
                directory.open_segment = segment
            else:
                self._not_prepared(old, error, create=create)
            directory.wake()

        shared.executor.submit(job, ended)

    def _not_prepared(self, old: Segment, error: BaseException, *, create: bool) -> None:
        if create or not isinstance(error, FileNotFoundError):  # a file that others deleted is no fault of the device
            self._directory.shared.trouble(self._directory.space.trouble(error, growing=create), error)
        if isinstance(error, OSError) and error.errno == errno.EROFS and not create:
            self.free_up(old)  # nor can it be deleted: it is tried again, and no second file is spent on it
        else:
            self._deletion.doom(old)

    def make_ahead(self) -> None:
        """Empties a segment if the open one is nearly full and there is no other place for the next."""
        directory = self._directory
        late = directory.open_segment is not None and directory.open_segment.room < EVICT_AHEAD
        if late and not self._free and not directory.space.may_take(directory.segment_bytes):
            self._evict()

    def _evict(self) -> bool:
        """Begins to empty the oldest closed segment that no job uses. False: there is none, and none will become one
        or is leaving."""
        if self.evictor.busy:
            return True
        victim = None
        in_use: list[tuple[int, int]] = []
        while victim is None and self._closed:
            entry = heapq.heappop(self._closed)
            segment = self._directory.segments.get(entry[1])
            if segment is None or segment.phase is not SegmentPhase.CLOSED:
                continue
            if segment.busy:
                in_use.append(entry)
            else:
                victim = segment
        for entry in in_use:
            heapq.heappush(self._closed, entry)
        if victim is not None:
            self.evictor.begin(victim)
            return True
        leaving = (SegmentPhase.CLOSING, SegmentPhase.CLOSED, SegmentPhase.EMPTY, SegmentPhase.DOOMED)
        return any(segment.phase in leaving for segment in self._directory.segments.values())

    def emptied(self, segment: Segment) -> None:
        """The segment's eviction has ended."""
        if segment.phase is SegmentPhase.EVICTING:
            segment.phase = SegmentPhase.EMPTY
        self._directory.ended(segment)
        self._directory.wake()

    def free_up(self, segment: Segment) -> None:
        """The segment holds nothing: keeps its file for the next one, or deletes it where it has another size or is
        one too many."""
        if segment.nbytes == self._directory.segment_bytes and not self._directory.space.over:
            segment.phase = SegmentPhase.FREE
            self._free.append(segment)
        else:
            self._deletion.doom(segment)

    def no_longer_free(self, segment: Segment) -> None:
        """A FREE segment is about to be deleted."""
        self._free.remove(segment)

    def shrink(self) -> None:
        """Deletes and empties segments, the oldest first, while they take more than the limit."""
        while self._directory.space.over:
            if not self._free:
                self._evict()
                return
            self._deletion.doom(self._free.popleft())
