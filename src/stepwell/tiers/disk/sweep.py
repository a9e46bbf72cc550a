"""Forgetting: everything that a directory holds, or what one namespace has in segments that others share.

    footer read ──► out of the index ──► reads under way end ──► frames zeroed ──► footer without them ──► synced
                                                                                   at the end all files ──► synced

A clear concerns the segments that there are when it is asked for. One that is open is closed before, so that what a
next life would find in a segment is what its footer lists, or, where it has none, its frames (`look`). A file in which
nothing else is left is deleted. So are those that wait for another life: until they begin it, a next life of the tier
would find in them what they had. What of the segments is being evicted or begun is waited for, and an eviction writes
no block again whose namespace is being forgotten: it would outlive its segment.

Segments are swept one by one, each for all clears that concern it. All but the blocks that stay becomes zeros: where
there is no footer, a frame whose header was misread just now is in none of the records, and must go all the same. Zeros
go first and the footer after them: a sweep that ends in between leaves frames that do not open, or none, and never a
footer that says less than the frames do.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Set
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stepwell.block.layout import PAGE
from stepwell.io.executor import Executor
from stepwell.io.files import File, Files
from stepwell.io.staging import Staging
from stepwell.tiers.base import Forgotten, TierCounts
from stepwell.tiers.disk.calls import Run
from stepwell.tiers.disk.deletion import Deletion
from stepwell.tiers.disk.index import BlockIndex, distinct
from stepwell.tiers.disk.layout import Footer
from stepwell.tiers.disk.recovery import Found, ids_of, look
from stepwell.tiers.disk.segment import Handles, Phase, Segment
from stepwell.tiers.disk.space import Space
from stepwell.tiers.disk.stream import blank, write_bytes

Mask = npt.NDArray[np.bool_]


class Owner(Protocol):
    """What a sweep needs of the directory whose segments it goes through."""

    files: Files
    handles: Handles
    space: Space
    segments: dict[int, Segment]
    reads: set[Run]
    unseen: bool

    def use(self, segment: Segment) -> None: ...

    def ended(self, segment: Segment) -> None: ...

    def discard(self, segment: Segment) -> None: ...

    def trouble(self, kind: str, error: BaseException, /) -> None: ...

    def wake(self) -> None: ...


class _Clear:
    """One clear: `left` are the numbers of the segments that it concerns and that are not done."""

    __slots__ = ("done", "gone", "left", "namespace")

    def __init__(self, namespace: bytes, left: set[int], done: Callable[[Forgotten], None]) -> None:
        self.namespace = namespace
        self.left = left
        self.done = done
        self.gone = Forgotten()


class Sweep:
    """Clears one directory. `busy`: a clear has not ended."""

    def __init__(
        self,
        owner: Owner,
        index: BlockIndex,
        deletion: Deletion,
        staging: Staging,
        executor: Executor,
        counts: TierCounts,
    ) -> None:
        self._owner = owner
        self._index = index
        self._deletion = deletion
        self._staging = staging
        self._executor = executor
        self._counts = counts
        self._under_way = 0
        self._clears: list[_Clear] = []  # of them, those that wait for segments
        self._sweeping = False
        self._awaited: Set[Run] = frozenset()  # that may read what was taken out of the index
        self._then: Callable[[], None] | None = None  # what waits for them

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def forgets(self, namespace: bytes) -> bool:
        """Blocks of this namespace are being forgotten: what lies in closed segments is not written again."""
        return any(clear.namespace == namespace for clear in self._clears)

    def concerns(self, segment: Segment, namespace: bytes) -> bool:
        """What this segment has of the namespace is about to go."""
        return any(clear.namespace == namespace and segment.number in clear.left for clear in self._clears)

    def begin(self, namespace: bytes, done: Callable[[Forgotten], None]) -> None:
        """Forgets what the segments of this moment have of a namespace, or, if it is empty, all of it: that at once.
        Of a namespace the owner has closed the open segment before, if there are blocks in it."""
        self._under_way += 1
        segments = list(self._owner.segments.values())
        clear = _Clear(namespace, {s.number for s in segments if s.phase is not Phase.OPEN}, done)
        if namespace:
            self._clears.append(clear)
            self._executor.submit(lambda: None, lambda _: self._owner.wake())
            return
        for segment in segments:
            if segment.phase not in (Phase.DOOMED, Phase.BEGINNING):
                self._owner.discard(segment)

        def deleted(gone: Forgotten) -> None:
            clear.gone = gone
            self._clears.append(clear)
            self._owner.wake()

        self._deletion.when_done(deleted)

    def go_on(self) -> None:
        """Something has ended that this may have waited for."""
        if self._then is not None and self._awaited.isdisjoint(self._owner.reads):
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
        """One that can be swept now. What is gone, or goes with all that it holds, is done."""
        found: Segment | None = None
        others = set()
        while clear.left and found is None:
            segment = self._owner.segments.get(clear.left.pop())
            if segment is None or segment.phase is Phase.DOOMED:
                continue
            if segment.phase in (Phase.FREE, Phase.EMPTY):
                self._owner.discard(segment)
                continue
            others.add(segment.number)
            if segment.phase in (Phase.CLOSED, Phase.KEPT):
                found = segment
        clear.left |= others
        return found

    def _finish(self, clear: _Clear) -> None:
        """Nothing of it is in any segment. In what a file had in an earlier life there may be some, and a power cut may
        bring that back as long as it was only written over."""
        self._clears.remove(clear)
        self._sync(clear, [s.name for s in self._owner.segments.values() if s.phase is not Phase.DOOMED])

    def _sync(self, clear: _Clear, names: list[str]) -> None:
        """One file after the other; one that is gone by then is as good."""
        if not names:
            self._end(clear)
            return
        name = names.pop()

        def job() -> None:
            with self._owner.handles.use(name) as file:
                file.sync()

        def ended(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, FileNotFoundError):
                self._owner.trouble("write", error)
                clear.gone += Forgotten(whole=False)
            self._sync(clear, names)

        self._executor.submit(job, ended)

    def _end(self, clear: _Clear) -> None:
        """Files may have to be deleted still."""

        def ended(deleted: Forgotten) -> None:
            self._under_way -= 1
            clear.done(clear.gone + Forgotten(whole=deleted.whole and not self._owner.unseen))
            self._owner.wake()

        self._deletion.when_done(ended)

    # one segment ------------------------------------------------------------------------------------------------------

    def _look(self, segment: Segment) -> None:
        """Finds in it what a next life would find."""
        self._sweeping = True
        self._owner.use(segment)
        looked: list[Found] = []

        def job() -> None:
            self._owner.handles.forget(segment.name)  # so that a file that lies there instead is noticed
            found = look(self._owner.files, segment.name, self._staging)
            if found.head is None or found.head.id != segment.id:
                raise OSError(errno.ESTALE, "another file has its name, or its head is damaged", segment.name)
            looked.append(found)

        def ended(error: BaseException | None) -> None:
            clears = [clear for clear in self._clears if segment.number in clear.left]
            if segment.phase is Phase.DOOMED:
                self._swept(segment, clears)
            elif error is not None:
                self._failed(segment, clears, "read", error)
            else:
                self._take_out(segment, clears, looked[0])

        self._executor.submit(job, ended)

    def _take_out(self, segment: Segment, clears: list[_Clear], found: Found) -> None:
        """From here on nobody finds its blocks. Who found them before may read them to the end."""
        assert found.footer is not None
        records = found.footer.records
        mine = np.zeros(len(records), np.bool_)
        for clear in clears:
            of = (records["namespace"] == np.void(clear.namespace)) & ~mine
            blocks = self._index.remove_many(ids_of(records[of]), segment.number, records["page"][of])
            clear.gone += Forgotten(blocks, int(records["pages"][of].sum()) * PAGE)
            mine |= of
        if found.closed and not mine.any():
            self._swept(segment, clears)
        elif mine.all():
            self._owner.discard(segment)
            self._swept(segment, clears)
        else:
            self._awaited = {run for run in self._owner.reads if run.segment is segment}
            self._then = partial(self._rewrite, segment, clears, found, mine)
            self.go_on()

    def _rewrite(self, segment: Segment, clears: list[_Clear], found: Found, mine: Mask) -> None:
        """Nobody reads its blocks any more: their frames go, and they from its footer. One that had no footer gets
        none: whatever looks at its frames finds the others."""
        footer = found.footer
        assert footer is not None
        end = found.nbytes - (Footer.nbytes(len(footer.records)) if found.closed else 0)
        written: list[int] = []

        def job() -> None:
            with self._owner.handles.use(segment.name) as file:
                written.append(blank(file, footer.records[~mine], end // PAGE))
                if found.closed:
                    written.append(self._write_footer(file, found.nbytes, footer, ~mine))

        def ended(error: BaseException | None) -> None:
            self._counts.device_bytes += sum(written)
            if error is not None:
                self._failed(segment, clears, self._owner.space.trouble(error), error)
            else:
                self._swept(segment, clears)

        self._executor.submit(job, ended)

    def _write_footer(self, file: File, end: int, old: Footer, kept: Mask) -> int:
        """In place of the old one: records that are kept, and the keys that they need. How many bytes were written."""
        records = old.records[kept]
        keys = distinct(records["key"])
        records["key"] = np.searchsorted(keys, records["key"])
        raw = Footer(old.segment, records, tuple(old.commitments[key] for key in keys.tolist())).pack()
        written = 0
        if rest := Footer.nbytes(len(old.records)) - len(raw):
            written = file.zero(end - len(raw) - rest, rest)
        write_bytes(file, raw, end - len(raw), self._staging)
        return written + len(raw)

    def _failed(self, segment: Segment, clears: list[_Clear], kind: str, error: BaseException) -> None:
        """What it has may be found again, unless its file is gone."""
        if isinstance(error, FileNotFoundError):
            self._owner.discard(segment)
        else:
            self._owner.trouble(kind, error)
            for clear in clears:
                clear.gone += Forgotten(whole=False)
        self._swept(segment, clears)

    def _swept(self, segment: Segment, clears: list[_Clear]) -> None:
        for clear in clears:
            clear.left.discard(segment.number)
        self._sweeping = False
        self._owner.ended(segment)
        self._owner.wake()
