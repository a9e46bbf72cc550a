"""Clearing: everything that a directory holds, or the blocks of one namespace in segments that it shares with others.

    footer read ──► out of the index ──► reads under way end ──► frames zeroed ──► footer without them ──► synced
                                                                                   at the end all files ──► synced

A clear concerns the segments that exist when it begins. An open one is closed first, so that a later life would find
in a segment the blocks that its footer lists, or, without a footer, its frames (`look`). A file that then holds no
other block is deleted. So is a FREE or EMPTY one: a later life of the tier would find its old blocks. The sweep waits
for segments that are being evicted or begun, and an eviction does not copy blocks of a namespace that is being cleared:
they would outlive their segment.

Segments are swept one by one, each for all clears that concern it. Every page but those of the blocks that stay becomes
zeros: without a footer, a frame whose header was misread is in none of the records, and must go all the same. Where a
later release wrote some of the frames only known ones of the namespace do, and the footer stays (`blank_known`). Zeros
are written before the footer: a sweep that is interrupted leaves frames that do not open, or none, but never a footer
that lists less than the frames hold.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.tiers.base import Forgotten
from stepwell.tiers.disk.calls import ReadRun
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.directory.deletion import Deletion
from stepwell.tiers.disk.index import distinct
from stepwell.tiers.disk.layout import Footer
from stepwell.tiers.disk.recovery import FoundFile, ids_of, look
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.stream import blank, blank_known, write_bytes

Mask = npt.NDArray[np.bool_]


class _Clear:
    """One clear. `left`: numbers of the segments that it still has to sweep. `gone`: what was forgotten so far."""

    __slots__ = ("done", "gone", "left", "namespace")

    def __init__(self, namespace: bytes, left: set[int], done: Callable[[Forgotten], None]) -> None:
        self.namespace = namespace
        self.left = left
        self.done = done
        self.gone = Forgotten()


class Sweep:
    """Runs the clears of one directory. `busy`: a clear has not ended."""

    def __init__(self, directory: Directory, deletion: Deletion) -> None:
        self._directory = directory
        self._shared = directory.shared
        self._deletion = deletion
        self._under_way = 0
        self._clears: list[_Clear] = []  # those that wait for segments
        self._sweeping = False
        self._awaited: Set[ReadRun] = frozenset()  # reads that may concern blocks just taken out of the index
        self._then: Callable[[], None] | None = None  # to be called when they have ended

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def is_forgetting(self, namespace: bytes) -> bool:
        """Blocks of this namespace are being cleared: those in closed segments are not written again."""
        return any(clear.namespace == namespace for clear in self._clears)

    def concerns(self, segment: Segment, namespace: bytes) -> bool:
        """The segment's blocks of this namespace are about to be deleted."""
        return any(clear.namespace == namespace and segment.number in clear.left for clear in self._clears)

    def begin(self, namespace: bytes, done: Callable[[Forgotten], None]) -> None:
        """Forgets the blocks of a namespace in the segments that exist now, or, if `namespace` is empty, all blocks at
        once. For a namespace, the directory has closed an open segment with blocks before."""
        self._under_way += 1
        segments = list(self._directory.segments.values())
        clear = _Clear(namespace, {s.number for s in segments if s.phase is not SegmentPhase.OPEN}, done)
        if namespace:
            self._clears.append(clear)
            self._shared.executor.submit(lambda: None, lambda _: self._directory.wake())
            return
        for segment in segments:
            if segment.phase not in (SegmentPhase.DOOMED, SegmentPhase.BEGINNING):
                self._directory.discard(segment)

        def deleted(gone: Forgotten) -> None:
            clear.gone = gone
            self._clears.append(clear)
            self._directory.wake()

        self._deletion.when_done(deleted)

    def go_on(self) -> None:
        """Resumes what may have waited for the end of a job."""
        if self._then is not None and self._awaited.isdisjoint(self._directory.reads):
            then, self._then = self._then, None
            then()
        for clear in list(self._clears):
            if self._sweeping:
                return
            segment = self._next(clear)
            if segment is not None:
                self._look(segment)
            elif not clear.left:
                self._finish(clear)

    def _next(self, clear: _Clear) -> Segment | None:
        """A segment that can be swept now, None while there is none. Segments that are gone, or are deleted whole, are
        struck off."""
        found: Segment | None = None
        others = set()
        while clear.left and found is None:
            segment = self._directory.segments.get(clear.left.pop())
            if segment is None or segment.phase is SegmentPhase.DOOMED:
                continue
            if segment.phase in (SegmentPhase.FREE, SegmentPhase.EMPTY):
                self._directory.discard(segment)
                continue
            others.add(segment.number)
            if segment.phase in (SegmentPhase.CLOSED, SegmentPhase.KEPT):
                found = segment
        clear.left |= others
        return found

    def _finish(self, clear: _Clear) -> None:
        """No segment holds a block of the namespace any more. The earlier content of a file may, and a power cut can
        restore it where it was overwritten and not synced: so all files are synced."""
        self._clears.remove(clear)
        self._sync(clear, [s.name for s in self._directory.segments.values() if s.phase is not SegmentPhase.DOOMED])

    def _sync(self, clear: _Clear, names: list[str]) -> None:
        """Syncs one file after the other; one that is gone by then needs none."""
        if not names:
            self._end(clear)
            return
        name = names.pop()

        def job() -> None:
            with self._directory.handles.use(name) as file:
                file.sync()

        def ended(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, FileNotFoundError):
                self._shared.trouble("write", error)
                clear.gone += Forgotten(whole=False)
            self._sync(clear, names)

        self._shared.executor.submit(job, ended)

    def _end(self, clear: _Clear) -> None:
        """Answers the clear once no file waits for its deletion."""

        def ended(deleted: Forgotten) -> None:
            self._under_way -= 1
            clear.done(clear.gone + Forgotten(whole=deleted.whole and not self._directory.unseen))
            self._directory.wake()

        self._deletion.when_done(ended)

    # one segment ------------------------------------------------------------------------------------------------------

    def _look(self, segment: Segment) -> None:
        """Finds the blocks of the segment, as a later life would."""
        self._sweeping = True
        self._directory.use(segment)
        looked: list[FoundFile] = []

        def job() -> None:
            self._directory.handles.forget(segment.name)  # so that another file in its place is noticed
            found = look(self._directory.files, segment.name, self._shared.staging)
            if found.head is None or found.head.id != segment.id:
                raise OSError(errno.ESTALE, "another file has its name, or its head is damaged", segment.name)
            looked.append(found)

        def ended(error: BaseException | None) -> None:
            clears = [clear for clear in self._clears if segment.number in clear.left]
            if segment.phase is SegmentPhase.DOOMED:
                self._swept(segment, clears)
            elif error is not None:
                self._failed(segment, clears, "read", error)
            else:
                self._take_out(segment, clears, looked[0])

        self._shared.executor.submit(job, ended)

    def _take_out(self, segment: Segment, clears: list[_Clear], found: FoundFile) -> None:
        """Takes the blocks out of the index: no read finds them from here on. Reads that found them before may end."""
        assert found.footer is not None
        records = found.footer.records
        mine = np.zeros(len(records), np.bool_)
        for clear in clears:
            of = (records["namespace"] == np.void(clear.namespace)) & ~mine
            blocks = self._shared.index.remove_many(ids_of(records[of]), segment.number, records["page"][of])
            clear.gone += Forgotten(blocks, int(records["pages"][of].sum()) * PAGE)
            mine |= of
        segment.unknown = segment.unknown or found.unknown
        if (found.closed or segment.unknown) and not mine.any():
            self._swept(segment, clears)
        elif mine.all() and not segment.unknown:
            self._directory.discard(segment)
            self._swept(segment, clears)
        else:
            self._awaited = {run for run in self._directory.reads if run.segment is segment}
            self._then = partial(self._rewrite, segment, clears, found, mine)
            self.go_on()

    def _rewrite(self, segment: Segment, clears: list[_Clear], found: FoundFile, mine: Mask) -> None:
        """No job reads the blocks any more: overwrites their frames, and writes the footer without them. A segment that
        had no footer gets none: the other blocks are found by their frames. Where a later release wrote, nothing but
        known frames of the blocks is overwritten."""
        footer = found.footer
        assert footer is not None
        end = found.nbytes - (Footer.nbytes(len(footer.records)) if found.closed else 0)
        written: list[int] = []

        def job() -> None:
            with self._directory.handles.use(segment.name) as file:
                if segment.unknown:
                    written.append(blank_known(file, footer.records[mine], segment.id, self._shared.staging))
                    return
                written.append(blank(file, footer.records[~mine], end // PAGE))
                if found.closed:
                    written.append(self._write_footer(file, found.nbytes, footer, ~mine))

        def ended(error: BaseException | None) -> None:
            self._shared.counts.device_bytes += sum(written)
            if error is not None:
                self._failed(segment, clears, self._directory.space.trouble(error), error)
            else:
                self._swept(segment, clears)

        self._shared.executor.submit(job, ended)

    def _write_footer(self, file: File, end: int, old: Footer, kept: Mask) -> int:
        """Replaces the old footer by one with the records to keep and the keys that they need; bytes written."""
        records = old.records[kept]
        keys = distinct(records["key"])
        records["key"] = np.searchsorted(keys, records["key"])
        commitments = tuple(old.commitments[key] for key in keys.tolist())
        raw = replace(old, records=records, commitments=commitments).pack()
        written = 0
        if rest := Footer.nbytes(len(old.records)) - len(raw):
            written = file.zero(end - len(raw) - rest, rest)
        write_bytes(file, raw, end - len(raw), self._shared.staging)
        return written + len(raw)

    def _failed(self, segment: Segment, clears: list[_Clear], kind: str, error: BaseException) -> None:
        """The segment's blocks may be found again, unless its file is gone."""
        if isinstance(error, FileNotFoundError):
            self._directory.discard(segment)
        else:
            self._shared.trouble(kind, error)
            for clear in clears:
                clear.gone += Forgotten(whole=False)
        self._swept(segment, clears)

    def _swept(self, segment: Segment, clears: list[_Clear]) -> None:
        for clear in clears:
            clear.left.discard(segment.number)
            if segment.unknown and segment.phase is not SegmentPhase.DOOMED:
                clear.gone += Forgotten(whole=False)
        self._sweeping = False
        self._directory.ended(segment)
        self._directory.wake()
