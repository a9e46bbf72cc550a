"""A segment as the tier keeps it in mind, and the bounded set of its open files."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

import numpy as np

from stepwell.block.frame import PAGE
from stepwell.io.files import File, Files
from stepwell.tiers.base import Incoming, Outgoing
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer


class Phase(Enum):
    OPEN = "open"  # blocks are placed in it
    CLOSING = "closing"  # nothing is placed any more; its footer is to come
    CLOSED = "closed"
    EVICTING = "evicting"  # its hot blocks are being written elsewhere
    FREE = "free"  # holds nothing; its file may be written anew under another id
    DOOMED = "doomed"  # its file goes as soon as nobody uses it
    KEPT = "kept"  # holds what we cannot read: counted, never deleted unasked


class Segment:
    """One life of a file. `id` is never used again; `end` is the next free page, `ordinal` the next frame's number.

    `busy` counts jobs that use the file: while there are any, it is not given another life.
    """

    __slots__ = ("blocks", "busy", "commitments", "end", "id", "name", "nbytes", "number", "ordinal", "phase",
                 "records", "sequence")  # fmt: skip

    def __init__(self, number: int, name: str, id: bytes, sequence: int, nbytes: int, phase: Phase) -> None:
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
        self.records: list[tuple[bytes, bytes, int, int, int, int]] = []  # those of RECORD, until it is closed
        self.commitments: dict[bytes, int] = {}

    def fits(self, nbytes: int, commitment: bytes) -> bool:
        """Frames of `nbytes` under this key have room, and so has the footer that lists them."""
        if commitment not in self.commitments and len(self.commitments) == MAX_KEYS:
            return False
        return self.end * PAGE + nbytes + Footer.nbytes(self.blocks + 1) <= self.nbytes

    def take(self, nbytes: int, frames: int, commitment: bytes) -> tuple[int, int]:
        """The first page and ordinal of frames that `fits` allowed."""
        page, ordinal = self.end, self.ordinal
        self.end += nbytes // PAGE
        self.ordinal += frames
        self.blocks += 1
        self.commitments.setdefault(commitment, len(self.commitments))
        return page, ordinal

    def record(self, block: bytes, namespace: bytes, page: int, nbytes: int, commitment: bytes, expires: int) -> None:
        """The block is written: it will be in the footer."""
        key = self.commitments[commitment]
        self.records.append((block, namespace, page, nbytes // PAGE, key, expires))

    def footer(self) -> Footer:
        self.records.sort(key=lambda record: record[2])
        return Footer(self.id, np.array(self.records, RECORD), tuple(self.commitments))

    @property
    def room(self) -> float:
        """Share of it that is free."""
        return 1 - self.end * PAGE / self.nbytes


class Handles:
    """Open files of segments, by name: at most `limit` of them idle or in use. Any thread."""

    def __init__(self, files: Files, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, tuple[File, int]] = OrderedDict()  # and how many use it

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[File]:
        """The file, open. Raises OSError."""
        with self._lock:
            known = self._open.get(name)
            if known is not None:
                self._open[name] = (known[0], known[1] + 1)
                self._open.move_to_end(name)
        file = known[0] if known is not None else self._enter(name, self._files.open(name))
        try:
            yield file
        finally:
            with self._lock:
                if (now := self._open.get(name)) is not None and now[0] is file:
                    self._open[name] = (file, now[1] - 1)
                elif file is not None:
                    file.close()  # was opened twice at once, or forgotten meanwhile

    def _enter(self, name: str, file: File) -> File:
        with self._lock:
            if name in self._open:
                return file  # another thread was quicker: ours lives for this use only
            self._open[name] = (file, 1)
            idle = [n for n, (_, users) in self._open.items() if not users] if len(self._open) > self._limit else []
            for other in idle[: len(self._open) - self._limit]:
                self._open.pop(other)[0].close()
        return file

    def forget(self, name: str) -> None:
        """Closes it as soon as nobody uses it: the file is gone, or another one."""
        with self._lock:
            known = self._open.pop(name, None)
        if known is not None and not known[1]:
            known[0].close()

    def close(self) -> None:
        with self._lock:
            for file, users in self._open.values():
                if not users:
                    file.close()
            self._open.clear()


class Run:
    """Blocks that lie side by side in one segment and come in one I/O."""

    __slots__ = ("blocks", "nbytes", "page", "segment")

    def __init__(self, segment: Segment, page: int) -> None:
        self.segment = segment
        self.page = page
        self.nbytes = 0
        self.blocks: list[tuple[int, Incoming]] = []  # and which of the answers is its

    def takes(self, segment: Segment, page: int, nbytes: int, most: int) -> bool:
        beside = segment is self.segment and page == self.page + self.nbytes // PAGE
        return beside and self.nbytes + nbytes <= most

    def add(self, at: int, block: Incoming) -> None:
        self.blocks.append((at, block))
        self.nbytes += block.nbytes


Placed = tuple[Outgoing, int, int, bytes]
"""A block, its first page, its first ordinal and the commitment to its key."""
