"""Adjacent blocks of a file, through one small buffer: each part is made or opened while it is in cache.

Requests of about 2 MiB from several threads keep a device as busy as larger ones do, with far less memory traffic: a
thread opens the bytes that it has read from its processor's cache (measured; docs/design/format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepwell.block.frame import FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.staging import Staging
from stepwell.tiers.base import Incoming, Outgoing, Place, Reading
from stepwell.tiers.disk.calls import ReadRun
from stepwell.tiers.disk.layout import Records, gaps

REQUEST = (2 << 20) + (64 << 10)
"""Largest request, in bytes: two parts of 1 MiB and headers, or four of 512 KiB. A single larger part is a request
of its own."""


def write_out(file: File, page: int, blocks: Sequence[tuple[Outgoing, Place]], staging: Staging) -> None:
    """Writes the blocks from this page on. Raises OSError, and the exceptions of a block's `make`."""
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
    """Writes whole pages other than frames: a head or a footer. Raises OSError."""
    with staging.lend(len(raw)) as buffer:
        buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
        file.write(buffer[: len(raw)], offset)


def blank(file: File, records: Records, end: int) -> int:
    """Overwrites every page before page `end` that no record covers with zeros and syncs them, so that a power cut
    cannot leave them behind a footer that is written next. Returns the bytes written. Raises OSError."""
    stretches = list(gaps(records, end))
    written = sum(file.zero(page * PAGE, pages * PAGE) for page, pages in stretches)
    if stretches:
        file.sync()
    return written


def blank_known(file: File, records: Records, segment: bytes, staging: Staging) -> int:
    """Overwrites frames of these blocks with zeros, in a segment that a later release wrote to: those whose headers are
    known here and say that they are of that block, namespace and segment. Of a block, what follows a frame that is not
    known stays. Returns the bytes written. Raises OSError."""
    written = 0
    with staging.lend(PAGE) as buffer:
        for record in records:
            page, end = int(record["page"]), int(record["page"]) + int(record["pages"])
            of = (segment, bytes(record["block"]), bytes(record["namespace"]))
            while page < end and file.read(buffer[:PAGE], page * PAGE) == PAGE:
                header = FrameHeader.parse(buffer[:PAGE].tobytes())
                if header is None or (header.segment, header.block, header.namespace) != of:
                    break
                nbytes = frame_bytes(header.payload)
                if nbytes > (end - page) * PAGE:
                    break
                written += file.zero(page * PAGE, nbytes)
                page += nbytes // PAGE
    return written


def read_in(file: File, page: int, blocks: Sequence[Incoming], segment: bytes, staging: Staging) -> Iterator[Reading]:
    """Reads the blocks from this page on; yields an answer for each, in order. Raises OSError, and the exceptions of a
    block's `open`; `fail` of the unanswered block has then been called."""
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
    file: File, run: ReadRun, answers: list[Reading], staging: Staging, trouble: Callable[[OSError], None]
) -> None:
    """Answers each block of the run. They are read together; after a failure one by one, so that one unreadable block
    does not cost its neighbours. `trouble` gets each failure."""
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
    """Sizes of consecutive requests, each of as many whole parts as fit."""
    total = 0
    for nbytes in parts:
        if total and total + nbytes > most:
            yield total
            total = 0
        total += nbytes
    yield total
