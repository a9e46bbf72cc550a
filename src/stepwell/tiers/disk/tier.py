"""The disk tier: one index over the segments of one or several directories."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from stepwell.block.layout import PAGE, MiB
from stepwell.block.namespace import BlockId
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.files import Files
from stepwell.io.staging import Staging
from stepwell.tiers.base import (
    Capacity,
    Forgotten,
    Incoming,
    KeyResolver,
    Outgoing,
    ReadDone,
    Reading,
    TierCounts,
    WriteDone,
)
from stepwell.tiers.disk.calls import MAX_RUN, ReadRun
from stepwell.tiers.disk.directory.base import Directory, DirectoryParts
from stepwell.tiers.disk.directory.directory import DiskDirectory
from stepwell.tiers.disk.index import BlockIndex
from stepwell.tiers.disk.recovery import MAX_BYTES, NAME, OURS, FileKind, FoundFile, NotAFile, ids_of, look
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.stream import REQUEST

MAX_SEGMENT, MIN_SEGMENT = 256 * MiB, 16 * MiB
MIN_SEGMENTS = 4
MIN_INDEX, MIN_BLOCK = 1 << 20, 64 << 10
"""The index has addresses for this many blocks, or for as many of this size, in bytes, as the tier could hold. More
blocks are not kept."""
_LOOKING = 8  # files looked at at a time in the recovery of one directory


def segment_bytes(limit: int) -> int:
    """Bytes of the segments of a directory that may hold `limit` bytes."""
    return max(MIN_SEGMENT, min(MAX_SEGMENT, limit // 64 // MiB * MiB))


@dataclass(frozen=True, slots=True)
class Site:
    """A directory that may be used, with its lock taken. `limit`, `reserve` and `segment` are bytes. `segment`: size of
    each segment file, whole pages; None: `segment_bytes(limit)`."""

    files: Files
    limit: int
    reserve: int
    segment: int | None = None


class DiskTier:
    """The `Tier` on local disks. `wall()`: Unix seconds. `trouble(kind, error)` takes errors of the device, on any
    thread; it must not block. `entropy(n)`: n unpredictable random bytes, for names and ids of segments. `staging`:
    buffers to use; None: the tier makes its own. `readers` reads blocks, so that no read waits for a thread that
    writes; None: `executor`, which does all else.

    Segments whose keys are not known, of another version, with frames of a later release, or with a damaged head are
    kept as they are until everything is cleared (`kept_segments`). Other files are counted (`foreign_files`) and never
    touched.
    """

    name = "disk"

    def __init__(
        self,
        sites: Sequence[Site],
        executor: Executor,
        clock: Clock,
        wall: Callable[[], float],
        key_resolver: KeyResolver,
        trouble: Callable[[str, BaseException], None] = lambda kind, error: None,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        staging: Staging | None = None,
        readers: Executor | None = None,
    ) -> None:
        self.counts = TierCounts()
        self.foreign_files = 0
        self._settled: Callable[[], None] | None = None
        self._executor = executor
        self._readers = readers or executor
        self._key_resolver = key_resolver
        self._told = trouble
        self._index = BlockIndex(max(MIN_INDEX, sum(site.limit for site in sites) // MIN_BLOCK))
        self._segments: dict[int, tuple[Directory, Segment]] = {}
        self._staging = staging or Staging(REQUEST)
        self._numbers = count(1)
        self._kept: list[Segment] = []  # a clear may have ended some of them
        shared = DirectoryParts(
            executor=executor,
            clock=clock,
            wall=wall,
            entropy=entropy,
            staging=self._staging,
            index=self._index,
            key_resolver=key_resolver,
            counts=self.counts,
            segments=self._segments,
            numbers=self._numbers,
            trouble=self._trouble,
            changed=self._check_settled,
            kept=self._kept,
        )
        self._directories = [
            DiskDirectory(
                site.files,
                shared,
                limit=site.limit,
                reserve=site.reserve,
                segment_bytes=site.segment or segment_bytes(site.limit),
            )
            for site in sites
        ]
        self._turn = 0

    def _trouble(self, kind: str, error: BaseException) -> None:
        self.counts.error(kind)
        self._told(kind, error)

    # blocks -----------------------------------------------------------------------------------------------------------

    def lookup(self, id: BlockId) -> bool:
        place = self._index.find(id)
        return place is not None and self._holder(place.segment) is not None

    def _holder(self, number: int) -> tuple[Directory, Segment] | None:
        """The segment with this number, or None if it was cleared: the index forgets its blocks a while after that."""
        known = self._segments.get(number)
        return known if known is not None and known[1].phase is not SegmentPhase.DOOMED else None

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        answers = [Reading.ABSENT] * len(blocks)
        runs: list[tuple[Directory, ReadRun]] = []
        for at, block in enumerate(blocks):
            place = self._index.find(block.id, use=True)
            known = self._holder(place.segment) if place is not None else None
            if place is None or known is None:
                continue
            directory, segment = known
            if not runs or not runs[-1][1].takes(segment, place.page, block.nbytes, MAX_RUN):
                runs.append((directory, ReadRun(segment, place.page)))
            runs[-1][1].add(at, block)
        jobs = [directory.read(run) for directory, run in runs]

        def job() -> None:
            for each in jobs:
                each(answers)

        def ended(error: BaseException | None) -> None:
            if error is not None:  # the caller's `open` raised: no fault of the device
                self._trouble("read", error)
            for directory, run in runs:
                self._settle_run(run, answers, failed=error is not None)
                directory.read_ended(run)
            done(answers)
            for directory, _ in runs:
                directory.wake()

        self._readers.submit(job, ended)

    def _settle_run(self, run: ReadRun, answers: list[Reading], *, failed: bool) -> None:
        """Removes blocks from the index that are absent, damaged, unknown, or unreadable beside others that can be
        read: they may then be written again, elsewhere. If the whole run fails its blocks stay: the device may
        recover."""
        alive = any(answers[at] is Reading.GOOD for at, _ in run.blocks)
        page = run.page
        for at, block in run.blocks:
            if failed and answers[at] is Reading.ABSENT:
                answers[at] = Reading.FAILED
            lost = answers[at] in (Reading.ABSENT, Reading.DAMAGED, Reading.UNKNOWN)
            gone = lost or (alive and answers[at] is Reading.FAILED)
            if answers[at] is Reading.UNKNOWN:
                self._keep_unknown(run.segment)
            if gone and self._index.find(block.id) == (run.segment.number, page):  # else it was written elsewhere
                self._index.remove(block.id)
            page += block.nbytes // PAGE

    def _keep_unknown(self, segment: Segment) -> None:
        known = self._segments.get(segment.number)
        if known is not None and segment.phase is not SegmentPhase.KEPT:
            known[0].keep_unknown(segment)

    def touch(self, id: BlockId) -> None:
        self._index.touch(id)

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        usable = [d for d in self._directories if d.ready and not d.space.ill] or self._directories
        self._turn += 1
        usable[self._turn % len(usable)].write(blocks, done)

    def drop(self, id: BlockId) -> None:
        self._index.remove(id)

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        left, total = len(self._directories), Forgotten()

        def cleared(forgotten: Forgotten) -> None:
            nonlocal left, total
            left -= 1
            total += forgotten
            if not left:
                done(total)

        for directory in self._directories:
            directory.clear(cleared, namespace)

    def capacity(self) -> Capacity:
        return Capacity(sum(d.used for d in self._directories), sum(d.limit for d in self._directories))

    def figures(self) -> dict[str, int]:
        return {
            "blocks": len(self._index),
            "segments": len(self._segments),
            "kept_segments": sum(segment.phase is SegmentPhase.KEPT for segment in self._kept),
            "foreign_files": self.foreign_files,
            "index_bytes": self._index.nbytes,
        }

    # an earlier life --------------------------------------------------------------------------------------------------

    def recover(self, done: Callable[[int], None]) -> None:
        left = len(self._directories)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                done(len(self._index))

        for directory in self._directories:
            _Recovery(self, directory, ended).begin()

    def _found(self, directory: DiskDirectory, found: FoundFile) -> None:
        """Takes in one file of an earlier life."""
        directory.space.used += found.nbytes
        number = next(self._numbers)
        if found.kind is FileKind.EMPTY and found.nbytes == directory.segment_bytes:
            directory.found(Segment(number, found.name, b"", 0, found.nbytes, SegmentPhase.EMPTY))
            return
        if found.kind in (FileKind.OTHER_VERSION, FileKind.HEADLESS):
            self._keep(directory, Segment(number, found.name, b"", 0, found.nbytes, SegmentPhase.CLOSED))
            return
        if found.head is None or found.footer is None:
            self.foreign_files += 1
            if found.kind is FileKind.STRANGE and PAGE < found.nbytes <= MAX_BYTES:
                directory.unseen = True  # a segment with both ends misread looks like that
            return
        segment = Segment(number, found.name, found.head.id, found.head.sequence, found.nbytes, SegmentPhase.CLOSED)
        footer = found.footer
        known = [self._key_resolver.knows(commitment, segment.id) for commitment in footer.commitments]
        records = footer.records
        segment.unknown, segment.codecs = found.unknown, footer.codecs
        if not all(known):
            records = records[[known[key] for key in records["key"].tolist()]]
        if found.unknown or not all(known):
            self._keep(directory, segment)
        else:
            directory.found(segment)
        try:
            self._index.put_many(ids_of(records), number, records["page"])
        except OverflowError as error:
            self._trouble("index_full", error)  # its blocks are not found, and its space is used again in its turn
        if not found.closed and segment.phase is SegmentPhase.CLOSED and segment.nbytes == found.head.nbytes:
            directory.close_found(segment, footer)

    def _keep(self, directory: DiskDirectory, segment: Segment) -> None:
        segment.phase = SegmentPhase.KEPT
        self._kept.append(segment)
        directory.found(segment)

    def _not_looked_at(self, directory: DiskDirectory, error: BaseException) -> None:
        """Counts a file with a segment's name that could not be read; unless it is no file, as a segment."""
        self._trouble("read", error)
        self.foreign_files += 1
        if not isinstance(error, NotAFile):
            directory.unseen = True
            directory.space.used += directory.segment_bytes

    # the end ----------------------------------------------------------------------------------------------------------

    def settle(self, done: Callable[[], None]) -> None:
        self._settled = done
        for directory in self._directories:
            directory.settle()
        self._executor.submit(lambda: None, lambda _: self._check_settled())

    def _check_settled(self) -> None:
        if self._settled is not None and not any(directory.busy for directory in self._directories):
            done, self._settled = self._settled, None
            done()

    def close(self) -> None:
        for directory in self._directories:
            directory.close()


class _Recovery:
    """Reads the files of one directory, a few at a time."""

    def __init__(self, tier: DiskTier, directory: DiskDirectory, done: Callable[[], None]) -> None:
        self._tier = tier
        self._directory = directory
        self._done = done
        self._names: list[str] = []
        self._looking = 0

    def begin(self) -> None:
        listed: list[list[str]] = []

        def ended(error: BaseException | None) -> None:
            if error is not None:
                self._tier._trouble("read", error)
                self._directory.known(unreadable=True)
                self._done()
                return
            names = sorted(listed[0], reverse=True)
            self._names = [name for name in names if NAME.fullmatch(name)]
            self._tier.foreign_files += sum(not NAME.fullmatch(name) and name not in OURS for name in names)
            self._more()

        self._tier._executor.submit(lambda: listed.append(self._directory.files.names()), ended)

    def _more(self) -> None:
        while self._names and self._looking < _LOOKING:
            self._looking += 1
            self._look(self._names.pop())
        if not self._looking:
            self._directory.known(unreadable=False)
            self._done()

    def _look(self, name: str) -> None:
        found: list[FoundFile] = []

        def ended(error: BaseException | None) -> None:
            self._looking -= 1
            if error is not None:
                self._tier._not_looked_at(self._directory, error)
            else:
                self._tier._found(self._directory, found[0])
            self._more()

        job = partial(look, self._directory.files, name, self._tier._staging)
        self._tier._executor.submit(lambda: found.append(job()), ended)
