"""Blocks that lie side by side in a file, through one small buffer: each part is made or opened while it is in cache.

Requests of about 2 MiB, several threads at a time, keep a device as busy as larger ones, and memory far less: what a
thread reads it opens at once from its processor's cache (measured; docs/design/format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.staging import Staging
from stepwell.tiers.base import Incoming, Outgoing, Place, Reading
from stepwell.tiers.disk.calls import Run
from stepwell.tiers.disk.layout import Records, gaps

REQUEST = (2 << 20) + (64 << 10)
"""Most bytes of one request, unless one part alone has more: two parts of 1 MiB and headers, or four of 512 KiB."""


def write_out(file: File, page: int, blocks: Sequence[tuple[Outgoing, Place]], staging: Staging) -> None:
    """Writes the blocks from this page on. Raises OSError, and whatever a block's `make` raises."""
    most = max(REQUEST, *(max(block.parts) for block, _ in blocks))
    offset, filled = page * PAGE, 0
    with staging.lend(most) as buffer:
        for block, place in blocks:
            for part, nbytes in enumerate(block.parts):
                if filled + nbytes > most:
                    file.write(buffer[:filled], offset)
                    offset, filled = offset + filled, 0
                block.make(part, buffer[filled : filled + nbytes], place)
                filled += nbytes
        file.write(buffer[:filled], offset)


def write_bytes(file: File, raw: bytes, offset: int, staging: Staging) -> None:
    """Writes whole pages that are no frames: a head, a footer. Raises OSError."""
    with staging.lend(len(raw)) as buffer:
        buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
        file.write(buffer[: len(raw)], offset)


def blank(file: File, records: Records, end: int) -> int:
    """Makes zeros, for good, of all pages before page `end` that no record accounts for: before a footer is written
    that hides them, or a power cut may leave both. How many bytes were written. Raises OSError."""
    stretches = list(gaps(records, end))
    written = sum(file.zero(page * PAGE, pages * PAGE) for page, pages in stretches)
    if stretches:
        file.sync()
    return written


def read_in(file: File, page: int, blocks: Sequence[Incoming], segment: bytes, staging: Staging) -> Iterator[Reading]:
    """Reads the blocks from this page on; yields an answer for each, in order. Raises OSError, and what a block's
    `open` raises: the block that was not answered has then been told to `fail`."""
    most = max(REQUEST, *(max(block.parts) for block in blocks))
    lengths = _requests([nbytes for block in blocks for nbytes in block.parts], most)
    offset, start, end, got = page * PAGE, 0, 0, 0
    with staging.lend(most) as buffer:
        for block in blocks:
            answer = Reading.GOOD
            try:
                for part, nbytes in enumerate(block.parts):
                    if start == end:
                        offset += end
                        start, end = 0, next(lengths)
                        got = file.read(buffer[:end], offset)
                    if answer is Reading.GOOD:
                        whole = start + nbytes <= got
                        answer = block.open(part, buffer[start : start + nbytes], segment) if whole else Reading.DAMAGED
                    start += nbytes
            except BaseException:
                block.fail()
                raise
            if answer is not Reading.GOOD:
                block.fail()
            yield answer


def read_run(
    file: File, run: Run, answers: list[Reading], staging: Staging, trouble: Callable[[OSError], None]
) -> None:
    """Answers each block of the run. All is read in one go; from a block on that cannot be read, one by one, so that it
    does not cost its neighbours. `trouble` is told of each failure."""
    left, page, most = run.blocks, run.page, len(run.blocks)
    while left:
        try:
            for answer in read_in(file, page, [block for _, block in left[:most]], run.segment.id, staging):
                (at, block), *left = left
                answers[at] = answer
                page += block.nbytes // PAGE
        except OSError as error:
            trouble(error)
            if most == 1:
                (at, block), *left = left
                answers[at] = Reading.FAILED
                page += block.nbytes // PAGE
            most = 1


def _requests(parts: Sequence[int], most: int) -> Iterator[int]:
    """Bytes of one request after the other: as many whole parts as fit into each."""
    total = 0
    for nbytes in parts:
        if total and total + nbytes > most:
            yield total
            total = 0
        total += nbytes
    yield total
