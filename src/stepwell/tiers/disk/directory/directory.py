"""One directory of the disk tier: its segments, and the parts that write, close, evict, clear and delete them.

Everything but the jobs happens on the tier's thread. A segment's life:

    file created, or free ──head written──► OPEN ──full, or a write failed──► CLOSING ──footer──► CLOSED
      ▲                                                                                            │
      └── FREE ◄──no job reads it──── EMPTY ◄──hot blocks copied── EVICTING ◄──the oldest──────────┘

From each of these a segment can become DOOMED, which ends with the deletion of its file. A segment stays CLOSED while
it is swept of a namespace. `Segment.busy` counts the jobs that use a segment's file: while there are any it is neither
deleted nor given another life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from stepwell.block.layout import PAGE
from stepwell.io.files import Files
from stepwell.tiers.base import Forgotten, Outgoing, Reading, WriteDone
from stepwell.tiers.disk.calls import ReadRun
from stepwell.tiers.disk.directory.base import DirectoryParts
from stepwell.tiers.disk.directory.deletion import Deletion
from stepwell.tiers.disk.directory.footers import Footers
from stepwell.tiers.disk.directory.placing import Placing
from stepwell.tiers.disk.directory.room import Room
from stepwell.tiers.disk.directory.space import Space
from stepwell.tiers.disk.directory.sweep import Sweep
from stepwell.tiers.disk.layout import Footer
from stepwell.tiers.disk.segment import Handles, Segment, SegmentPhase
from stepwell.tiers.disk.stream import read_run

MAX_OPEN = 512
"""Segment files kept open at a time."""


class DiskDirectory:
    """The `Directory` that owns the parts. `limit`, `reserve` and `segment_bytes` are bytes."""

    def __init__(self, files: Files, shared: DirectoryParts, *, limit: int, reserve: int, segment_bytes: int) -> None:
        self.shared = shared
        self.files = files
        self.handles = Handles(files, MAX_OPEN)
        self.space = Space(limit, reserve, shared.clock)
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.open_segment: Segment | None = None
        self.reads: set[ReadRun] = set()
        self.ready = False
        self.unreadable = False
        self.unseen = False
        self._jobs = 0  # jobs under way that use segments
        self._to_clear: list[Callable[[], None]] = []  # clears that wait until the segments here are known
        self._footers = Footers(self)
        self._placing = Placing(self)
        self._deletion = Deletion(self)
        self._room = Room(self, self._placing, self._deletion)
        self._sweep = Sweep(self, self._deletion)

    @property
    def used(self) -> int:
        return self.space.used

    @property
    def limit(self) -> int:
        return self.space.limit

    @property
    def busy(self) -> bool:
        """Blocks wait, jobs run, or a clear has not ended."""
        return self._placing.waits or self._room.beginning or self._jobs > 0 or self._sweep.busy

    # jobs -------------------------------------------------------------------------------------------------------------

    def read(self, run: ReadRun) -> Callable[[list[Reading]], None]:
        segment, trouble = run.segment, self.shared.trouble
        self.use(segment)
        self.reads.add(run)

        def job(answers: list[Reading]) -> None:
            try:
                with self.handles.use(segment.name) as file:
                    read_run(file, run, answers, self.shared.staging, lambda error: trouble("read", error))
            except FileNotFoundError:
                pass  # its blocks stay ABSENT
            except OSError as error:
                trouble("read", error)
                for at, _ in run.blocks:
                    answers[at] = Reading.FAILED

        return job

    def read_ended(self, run: ReadRun) -> None:
        self.reads.discard(run)
        self.ended(run.segment)

    def use(self, segment: Segment) -> None:
        segment.busy += 1
        self._jobs += 1

    def ended(self, segment: Segment) -> None:
        segment.busy -= 1
        self._jobs -= 1
        if segment.busy:
            return
        if segment.phase is SegmentPhase.CLOSING:
            self._footers.finish(segment)
        elif segment.phase is SegmentPhase.EMPTY:
            self._room.free_up(segment)
        elif segment.phase is SegmentPhase.DOOMED:
            self._deletion.go(segment)

    def wake(self) -> None:
        self._room.shrink()
        self._placing.go_on()
        self._sweep.go_on()
        self.shared.changed()

    # writing ----------------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        self._placing.add(blocks, self.segment_bytes - PAGE - Footer.nbytes(1), done)

    def begin(self) -> None:
        if not self._room.beginning:
            self._footers.close_open()
            self._room.begin()

    def placed(self) -> None:
        self._room.make_ahead()

    def failed(self, segment: Segment, error: BaseException) -> None:
        self.shared.trouble(self.space.trouble(error), error)
        segment.torn = True
        if segment is self.open_segment:
            self.open_segment = None
        if segment.phase is SegmentPhase.OPEN:
            segment.phase = SegmentPhase.CLOSING

    def closed(self, segment: Segment) -> None:
        self._room.closed(segment)

    # forgetting -------------------------------------------------------------------------------------------------------

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        """Forgets all blocks, or those of one namespace: see `Sweep`. Blocks that wait for a place are refused. A clear
        waits until the segments of earlier lives are known."""
        if not (self.ready or self.unreadable):
            self._to_clear.append(partial(self.clear, done, namespace))
            return
        self._placing.refuse(namespace)
        self._deletion.again()
        if namespace and self.open_segment is not None and self.open_segment.blocks:
            self._footers.close_open()
        self._sweep.begin(namespace, done)

    def is_forgetting(self, namespace: bytes) -> bool:
        return self._sweep.is_forgetting(namespace)

    def is_leaving(self, segment: Segment, namespace: bytes) -> bool:
        return segment.phase is SegmentPhase.DOOMED or self._sweep.concerns(segment, namespace)

    def free_up(self, segment: Segment) -> None:
        self._room.free_up(segment)

    def discard(self, segment: Segment) -> None:
        if segment is self.open_segment:
            self.open_segment = None
        elif segment.phase is SegmentPhase.FREE:
            self._room.no_longer_free(segment)
        self._deletion.doom(segment)

    def keep_unknown(self, segment: Segment) -> None:
        if segment.phase in (SegmentPhase.CLOSED, SegmentPhase.EVICTING):
            segment.phase = SegmentPhase.KEPT
            segment.unknown = True
            self.shared.kept.append(segment)

    # earlier and later lives ------------------------------------------------------------------------------------------

    def enter(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self.shared.segments[segment.number] = (self, segment)

    def forget(self, segment: Segment) -> None:
        self.segments.pop(segment.number, None)
        self.shared.segments.pop(segment.number, None)

    def found(self, segment: Segment) -> None:
        """Takes in a file that an earlier life left; its phase is CLOSED, KEPT or EMPTY."""
        self._room.seen(segment.sequence)
        self.enter(segment)
        if segment.phase is SegmentPhase.EMPTY:
            self._room.free_up(segment)
        elif segment.phase is SegmentPhase.CLOSED:
            self._room.closed(segment)

    def close_found(self, segment: Segment, footer: Footer) -> None:
        """Writes the footer that a segment of an earlier life lacks."""
        self._footers.close_found(segment, footer)

    def known(self, *, unreadable: bool) -> None:
        """Every file of an earlier life has been taken in, or, `unreadable`, they cannot be listed. Nothing is written
        before this: only now is it known how much space is used."""
        self.ready, self.unreadable = not unreadable, unreadable
        self.unseen |= unreadable
        waiting, self._to_clear = self._to_clear, []
        for clear in waiting:
            clear()
        self.wake()

    def settle(self) -> None:
        """Closes the open segment, so that the next life finds its footer."""
        self._footers.close_open()

    def close(self) -> None:
        self.handles.close()
        self.files.close()
