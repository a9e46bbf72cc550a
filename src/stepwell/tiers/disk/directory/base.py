"""A directory as its parts see it, and the parts of the tier that all its directories share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.files import Files
from stepwell.io.staging import Staging
from stepwell.tiers.base import KeyResolver, Reading, TierCounts
from stepwell.tiers.disk.calls import ReadRun
from stepwell.tiers.disk.directory.space import Space
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.segment import Handles, Segment


@dataclass(slots=True)
class DirectoryParts:
    """Parts of one tier that its directories share.

    `wall()`: Unix seconds. `entropy(n)`: n unpredictable random bytes. `trouble(kind, error)` takes errors of the
    device, on any thread. `changed()` is called whenever a job has ended. `segments`: every segment of the tier by its
    number, which is taken from `numbers` and never used twice. `kept`: those that are or were KEPT.
    """

    executor: Executor
    clock: Clock
    wall: Callable[[], float]
    entropy: Callable[[int], bytes]
    staging: Staging
    index: BlockIndex
    key_resolver: KeyResolver
    counts: TierCounts
    segments: dict[int, tuple[Directory, Segment]]
    numbers: count[int]
    trouble: Callable[[str, BaseException], None]
    changed: Callable[[], None]
    kept: list[Segment]


class Directory(Protocol):
    """One directory of the tier. All calls are made on the tier's thread."""

    shared: DirectoryParts
    files: Files
    handles: Handles
    space: Space
    segment_bytes: int
    """Size of a new segment file."""
    segments: dict[int, Segment]
    """Segments of this directory, by number."""
    open_segment: Segment | None
    """The segment that new blocks are placed in."""
    reads: set[ReadRun]
    """Reads under way."""
    ready: bool
    """The segments of earlier lives are known."""
    unreadable: bool
    """The directory could not be listed: nothing is written here."""
    unseen: bool
    """Files here may be segments that could not be read: a clear is then not whole."""

    def read(self, run: ReadRun) -> Callable[[list[Reading]], None]:
        """A job that reads the run and writes its answers into the list that it is given; `read_ended` must follow."""

    def read_ended(self, run: ReadRun) -> None: ...

    def use(self, segment: Segment) -> None:
        """A job is about to use the segment's file; `ended` must follow."""

    def ended(self, segment: Segment) -> None:
        """A job that used the segment's file has ended."""

    def wake(self) -> None:
        """Resumes work that waits for room or for the end of a job."""

    def begin(self) -> None:
        """Makes an open segment with room, in the background, or refuses the waiting blocks if there will be none."""

    def placed(self) -> None:
        """Blocks have been placed in the open segment: makes room for the next segment in time."""

    def failed(self, segment: Segment, error: BaseException) -> None:
        """A write to the segment has failed: nothing more is placed in it. Blocks that were written before stay
        readable, since each frame proves itself."""

    def closed(self, segment: Segment) -> None:
        """The segment is complete: it becomes CLOSED and is evicted in its turn."""

    def free_up(self, segment: Segment) -> None:
        """The segment holds nothing any more: its file is used again, or deleted if it has another size or is one too
        many."""

    def discard(self, segment: Segment) -> None:
        """Deletes the segment's file, with all that it holds, once no job uses it."""

    def keep_unknown(self, segment: Segment) -> None:
        """A later release wrote some of the segment's frames: only a clear touches it any more (see `Sweep`)."""

    def enter(self, segment: Segment) -> None:
        """Makes a segment known here and in the tier."""

    def forget(self, segment: Segment) -> None:
        """Undoes `enter`."""

    def is_leaving(self, segment: Segment, namespace: bytes) -> bool:
        """The segment's blocks of this namespace are about to be deleted."""

    def is_forgetting(self, namespace: bytes) -> bool:
        """Blocks of this namespace are being cleared: those in closed segments are not written again."""
