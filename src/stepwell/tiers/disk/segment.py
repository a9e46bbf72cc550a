"""State of one segment, and the bounded set of open segment files."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

import numpy as np

from stepwell.block.frame import NO_CODEC
from stepwell.block.layout import PAGE
from stepwell.io.files import File, Files
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer


class SegmentPhase(Enum):
    BEGINNING = "beginning"  # its file is being created, or begins another life
    OPEN = "open"  # blocks are placed in it
    CLOSING = "closing"  # takes no more blocks; the footer is not written yet
    CLOSED = "closed"
    EVICTING = "evicting"  # its hot blocks are being copied to the open segment
    EMPTY = "empty"  # holds nothing, and becomes free once no job uses it
    FREE = "free"  # its file may begin another life
    DOOMED = "doomed"  # its blocks count as gone, and its file is deleted once no job uses it
    KEPT = "kept"  # cannot be read with the keys at hand, or by this release: counted, and deleted only on request


class Segment:
    """One life of a segment file. `id`: 16 bytes, never used twice. `end`: next free page. `ordinal`: number of the
    next part. `busy`: jobs that use the file, which begins no other life meanwhile. `torn`: a write has failed.
    `codecs`: bit n is set if frames of codec n may be in it. `unknown`: a later release wrote some of its frames.
    """

    __slots__ = ("blocks", "busy", "codecs", "commitments", "end", "id", "name", "nbytes", "number", "ordinal", "phase",
                 "records", "sequence", "torn", "unknown")  # fmt: skip

    def __init__(self, number: int, name: str, id: bytes, sequence: int, nbytes: int, phase: SegmentPhase) -> None:
        self.number = number
        self.name = name
        self.id = id
        self.sequence = sequence
        self.nbytes = nbytes
        self.phase = phase
        self.end = 1
        self.ordinal = 0
        self.busy = 0
        self.blocks = 0
        self.codecs = 1 << NO_CODEC
        self.records: list[tuple[bytes, bytes, int, int, int, int]] = []  # fields of RECORD, until it is closed
        self.commitments: dict[bytes, int] = {}
        self.torn = False
        self.unknown = False

    def fits(self, nbytes: int, commitment: bytes) -> bool:
        """There is room for frames of `nbytes` bytes under this key, and for the footer that lists them."""
        if commitment not in self.commitments and len(self.commitments) == MAX_KEYS:
            return False
        return self.end * PAGE + nbytes + Footer.nbytes(self.blocks + 1) <= self.nbytes

    def take(self, nbytes: int, parts: int, commitment: bytes) -> tuple[int, int]:
        """Takes the space that `fits` has granted: the first page and ordinal of frames in `parts` parts."""
        page, ordinal = self.end, self.ordinal
        self.end += nbytes // PAGE
        self.ordinal += parts
        self.blocks += 1
        self.commitments.setdefault(commitment, len(self.commitments))
        return page, ordinal

    def record(self, block: bytes, namespace: bytes, page: int, nbytes: int, commitment: bytes, expires: int) -> None:
        """Adds a written block to the footer to come."""
        key = self.commitments[commitment]
        self.records.append((block, namespace, page, nbytes // PAGE, key, expires))

    def footer(self) -> Footer:
        self.records.sort(key=lambda record: record[2])
        return Footer(self.id, np.array(self.records, RECORD), tuple(self.commitments), self.codecs)

    @property
    def room(self) -> float:
        """Free share of the segment, 0 to 1."""
        return 1 - self.end * PAGE / self.nbytes


class _Open:
    """An open file and the number of its users."""

    __slots__ = ("file", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 1


class Handles:
    """Open segment files by name, for any thread. At most `limit` stay open, unless more are in use."""

    def __init__(self, files: Files, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[File]:
        """The file, open within the `with` block. Raises OSError."""
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                known.users += 1
                self._open.move_to_end(name)
        if known is None:
            known = self._enter(name, _Open(self._files.open(name)))
        try:
            yield known.file
        finally:
            with self._lock:
                known.users -= 1
                if not known.users and self._open.get(name) is not known:
                    known.file.close()  # was opened twice at once, or forgotten meanwhile

    def _enter(self, name: str, new: _Open) -> _Open:
        with self._lock:
            if name in self._open:
                return new  # another thread was quicker: ours lives for this use only
            self._open[name] = new
            too_many = len(self._open) - self._limit
            if too_many > 0:
                for other in [n for n, o in self._open.items() if not o.users][:too_many]:
                    self._open.pop(other).file.close()
        return new

    def forget(self, name: str) -> None:
        """Closes the file once it is unused: the name stands for no file, or another one, from now on."""
        with self._lock:
            known = self._open.pop(name, None)
            if known is not None and not known.users:
                known.file.close()

    def close(self) -> None:
        with self._lock:
            for known in self._open.values():
                if not known.users:
                    known.file.close()
            self._open.clear()
