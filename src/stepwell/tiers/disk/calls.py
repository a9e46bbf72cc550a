"""What is under way in a directory: reads of blocks that lie side by side, and writes with their answers."""

from __future__ import annotations

from collections import deque

from stepwell.block.layout import PAGE
from stepwell.tiers.base import Incoming, Outgoing, WriteDone, Writing
from stepwell.tiers.disk.segment import Segment

MOST_RUN = 9 << 20
"""Bytes that one thread moves at a stretch, unless one block alone has more: 8 MiB of payload and its frames' rest."""


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


class Call:
    """One call of `write`. Its blocks may end up in several jobs and segments; it is answered when the last of them
    has ended, and not before: until then the makers of all its blocks may still run."""

    __slots__ = ("_answers", "_done", "blocks", "running")

    def __init__(self, blocks: deque[tuple[int, Outgoing]], answers: list[Writing], done: WriteDone) -> None:
        self.blocks = blocks  # those without a place, and which of the answers is theirs
        self.running = 0  # jobs that write the others
        self._answers = answers
        self._done = done

    def answer(self, at: int, writing: Writing) -> None:
        self._answers[at] = writing

    def refuse(self, writing: Writing, namespace: bytes = b"") -> None:
        """Blocks without a place get none: all, or those of one namespace."""
        left, self.blocks = self.blocks, deque()
        for at, block in left:
            if namespace and block.namespace != namespace:
                self.blocks.append((at, block))
            else:
                self._answers[at] = writing

    @property
    def ended(self) -> bool:
        return not self.blocks and not self.running

    def finish(self) -> None:
        self._done(self._answers)


Placed = tuple[int, Outgoing, int, int, bytes]
"""Which of the answers is its, the block, its first page, its first ordinal and the commitment to its key."""
