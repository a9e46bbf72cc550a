"""Reads and writes under way: runs of adjacent blocks, and calls of `write` with their answers."""

from __future__ import annotations

from collections import deque

from stepwell.block.layout import PAGE
from stepwell.tiers.base import Incoming, Outgoing, WriteDone, Writing
from stepwell.tiers.disk.segment import Segment

MAX_RUN = 9 << 20
"""Largest run that one thread moves, in bytes: 8 MiB of payload and the rest of its frames. A single larger block is a
run of its own."""


class ReadRun:
    """Adjacent blocks of one segment, read in one I/O. `page`: the first page of the first block."""

    __slots__ = ("blocks", "nbytes", "page", "segment")

    def __init__(self, segment: Segment, page: int) -> None:
        self.segment = segment
        self.page = page
        self.nbytes = 0
        self.blocks: list[tuple[int, Incoming]] = []  # each with the index of its answer

    def takes(self, segment: Segment, page: int, nbytes: int, most: int) -> bool:
        """A block at this place continues the run, within `most` bytes."""
        beside = segment is self.segment and page == self.page + self.nbytes // PAGE
        return beside and self.nbytes + nbytes <= most

    def add(self, at: int, block: Incoming) -> None:
        self.blocks.append((at, block))
        self.nbytes += block.nbytes


class WriteCall:
    """One call of `write`. Its blocks may be spread over several jobs and segments. It is answered when the last of
    them has ended, and not before: until then the makers of all its blocks may still run."""

    __slots__ = ("_answers", "_done", "blocks", "running")

    def __init__(self, blocks: deque[tuple[int, Outgoing]], answers: list[Writing], done: WriteDone) -> None:
        self.blocks = blocks  # those without a place yet, each with the index of its answer
        self.running = 0  # jobs that write its other blocks
        self._answers = answers
        self._done = done

    def answer(self, at: int, writing: Writing) -> None:
        self._answers[at] = writing

    def refuse(self, writing: Writing, namespace: bytes = b"") -> None:
        """Answers blocks without a place with `writing`: all, or those of one namespace."""
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
"""A block with a place: index of its answer, block, first page, first ordinal, and commitment to its key."""
