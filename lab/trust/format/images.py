"""Whole segments in memory, closed or open, and what a next life makes of one whose bytes were changed."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np

from lab.trust.format.made import NOW, Block, Maker, segment
from lab.trust.format.pieces import Tally
from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.memory import Bytes
from stepwell.io.staging import Staging
from stepwell.tiers.base import Place, Reading
from stepwell.tiers.disk.layout import Footer, Head
from stepwell.tiers.disk.recovery import FileKind, FoundFile, look
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.stream import read_in

PAGES = 16
NAME = "0123456789abcdef.seg"
_staging = Staging(1)


class MemoryFile:
    """These bytes, as a file. It is only read: what writes to it has broken the code that looks at damaged files."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def read(self, into: Bytes, offset: int) -> int:
        got = self._data[offset : offset + len(into)]
        into[: len(got)] = got
        return len(got)

    def write(self, data: Bytes, offset: int) -> None:
        raise OSError(errno.EROFS, "this file is only looked at")

    def zero(self, offset: int, nbytes: int) -> int:
        raise OSError(errno.EROFS, "this file is only looked at")

    def sync(self) -> None:
        raise OSError(errno.EROFS, "this file is only looked at")

    def blank(self) -> bool:
        return False

    def size(self) -> int:
        return len(self._data)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class OneFile:
    """A directory with one file, for `look`."""

    data: Bytes

    def open(self, name: str) -> File:
        return MemoryFile(self.data)


class Image:
    """A segment with `blocks` of a maker, as many as fit into its pages."""

    def __init__(self, maker: Maker, *, number: int = 0, closed: bool = True, pages: int = PAGES) -> None:
        self.maker = maker
        self.id = segment(number)
        self.data = np.zeros(pages * PAGE, np.uint8)
        self.data[:PAGE] = np.frombuffer(Head(self.id, 7, len(self.data), NOW).pack(), np.uint8)
        self.blocks: dict[bytes, Block] = {}
        books = Segment(1, NAME, self.id, 7, len(self.data), SegmentPhase.OPEN)
        while True:
            block = Block(number=len(self.blocks))
            out = maker.outgoing(block)
            commitment = out.commit(self.id)
            if not books.fits(out.nbytes, commitment):
                break
            page, ordinal = books.take(out.nbytes, len(out.parts), commitment)
            frames = np.concatenate(maker.frames(block, Place(self.id, ordinal)))
            self.data[page * PAGE : page * PAGE + len(frames)] = frames
            books.record(out.id, out.namespace, page, out.nbytes, commitment, 0)
            self.blocks[out.id] = block
        self.footer = books.footer()
        if closed:
            raw = self.footer.pack()
            self.data[-len(raw) :] = np.frombuffer(raw, np.uint8)

    @property
    def footer_bytes(self) -> int:
        return Footer.nbytes(len(self.blocks))

    def judge(self, tally: Tally, data: Bytes, what: str) -> FoundFile:
        """Looks at changed bytes as a next life does, and reads what it says it found: right bytes, or misses."""
        found = look(OneFile(data), NAME, _staging)
        tally.cases += 1
        if found.kind is not FileKind.GOOD or found.head is None or found.footer is None:
            return found
        for record in found.footer.records:
            block = self.blocks.get(bytes(record["block"]))
            if block is None:
                continue
            incoming = self.maker.incoming(block)
            (answer,) = read_in(MemoryFile(data), int(record["page"]), [incoming], found.head.id, _staging)
            if answer is Reading.GOOD:
                tally.right += 1
                if not self.maker.right(block):
                    tally.wrong(f"{what}: other bytes of {block}")
            elif not self.maker.wiped():
                tally.wrong(f"{what}: {block} left something in a slot")
        return found
