"""Reading the segment files of earlier lives: by their footers, or, where a segment was still open, by its frames.

Nothing read here is trusted: places are hints, and each frame proves itself when it is read. Files that are not
understood are counted and left alone.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from stepwell.block.frame import MAGIC, NO_CODEC, FrameHeader, frame_bytes, is_unknown
from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.staging import Staging
from stepwell.tiers.disk.index import PAGES
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer, Head, OtherVersion, Records, Trailer

NAME = re.compile(r"[0-9a-f]{16}\.seg")
LOCK, README = "lock", "README.txt"
OURS = (LOCK, README)
_FIRST_STEP = 64 << 10


MAX_BYTES = PAGES * PAGE
"""Largest segment file: the index can address no page beyond."""


class NotAFile(OSError):
    """No regular file has this segment's name, but a link, a directory or a device."""


class ReadableFiles(Protocol):
    """The part of `Files` that `look` uses."""

    def open(self, name: str) -> File: ...


class FileKind(Enum):
    """State of a file with a segment's name."""

    GOOD = "good"  # it has a head, and its blocks are known from its footer or its frames
    EMPTY = "empty"  # created and never written
    OTHER_VERSION = "other_version"
    HEADLESS = "headless"  # a segment by its trailer, with a damaged head
    STRANGE = "strange"  # nothing shows that it is a segment


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file and its size. `footer`: the blocks of a GOOD one. `closed`: the file has this footer; else it was put
    together from the frames. `unknown`: a later release wrote some of its frames."""

    name: str
    kind: FileKind
    nbytes: int
    head: Head | None = None
    footer: Footer | None = None
    closed: bool = False
    unknown: bool = False


def look(files: ReadableFiles, name: str, staging: Staging) -> FoundFile:
    """Reads the head and the blocks of one segment file. Blocks; raises OSError, `NotAFile` if it is no regular
    file."""
    try:
        file = files.open(name)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL):
            raise NotAFile(error.errno, error.strerror, name) from error
        raise
    try:
        nbytes = file.size()
        try:
            return _look(file, name, nbytes, staging)
        except OtherVersion:
            return FoundFile(name, FileKind.OTHER_VERSION, nbytes)
    finally:
        file.close()


def _look(file: File, name: str, nbytes: int, staging: Staging) -> FoundFile:
    with staging.lend(PAGE) as buffer:
        got = file.read(buffer[:PAGE], 0)
        page = buffer[:got].tobytes()
    head = Head.parse(page)
    if head is None or nbytes > MAX_BYTES:
        return FoundFile(name, _headless(file, nbytes, staging), nbytes)
    if head.nbytes == nbytes:
        footer = read_footer(file, head.id, staging)
        if footer is not None:
            unknown, footer = not footer.understood, replace(footer, version=head.version)
            return FoundFile(name, FileKind.GOOD, nbytes, head, footer, closed=True, unknown=unknown)
    footer, unknown = _scan(file, head.id, nbytes, staging)
    footer = replace(footer, version=head.version)
    return FoundFile(name, FileKind.GOOD, nbytes, head, footer, unknown=unknown)


def _headless(file: File, nbytes: int, staging: Staging) -> FileKind:
    if nbytes and nbytes % PAGE == 0 and file.blank():
        return FileKind.EMPTY
    return FileKind.HEADLESS if _read_trailer(file, nbytes // PAGE * PAGE, staging) is not None else FileKind.STRANGE


def _read_trailer(file: File, end: int, staging: Staging) -> Trailer | None:
    with staging.lend(PAGE) as buffer:
        if end < 2 * PAGE or file.read(buffer[:PAGE], end - PAGE) != PAGE:
            return None
        return Trailer.parse(buffer[:PAGE].tobytes())


def read_footer(file: File, segment: bytes, staging: Staging) -> Footer | None:
    """The footer of a closed segment; None if it is missing, damaged, or of another life of the file."""
    end = file.size() // PAGE * PAGE
    trailer = _read_trailer(file, end, staging)
    if trailer is None or trailer.segment != segment or trailer.nbytes > end - 2 * PAGE:
        return None
    with staging.lend(trailer.nbytes) as buffer:
        raw = buffer[: trailer.nbytes]
        if trailer.nbytes and file.read(raw, end - PAGE - trailer.nbytes) != trailer.nbytes:
            return None
        return trailer.footer(raw.tobytes(), end // PAGE)


def _scan(file: File, segment: bytes, nbytes: int, staging: Staging) -> tuple[Footer, bool]:
    """Finds the blocks of a segment that was open, header by header. There may be gaps: writes ran side by side, and a
    sweep leaves zeros, up to the whole segment. And whether there are frames of a later release."""
    records: list[tuple[bytes, bytes, int, int, int, int]] = []
    keys: dict[bytes, int] = {}
    page, first, shards, unknown, codecs = 1, 1, 0, False, 1 << NO_CODEC
    with staging.lend(PAGE) as buffer:
        while (page + 1) * PAGE <= nbytes and file.read(buffer[:PAGE], page * PAGE) == PAGE:
            raw = buffer[:PAGE].tobytes()
            header = FrameHeader.parse(raw)
            if header is None or header.segment != segment or header.shard != shards:
                page, later = _beyond_gap(file, segment, max(page, first) + 1, nbytes, staging)
                unknown = unknown or later or (header is None and is_unknown(raw, segment))
                if not page:
                    break
                first, shards = page, 0
                continue
            page += frame_bytes(header.payload) // PAGE
            shards += 1
            if shards < header.shards:
                continue
            if page * PAGE > nbytes or (header.commitment not in keys and len(keys) == MAX_KEYS):
                break
            key = keys.setdefault(header.commitment, len(keys))
            records.append((header.block, header.namespace, first, page - first, key, header.expires))
            codecs |= 1 << header.codec
            first, shards = page, 0
    return Footer(segment, np.array(records, RECORD), tuple(keys), codecs), unknown


def _beyond_gap(file: File, segment: bytes, page: int, nbytes: int, staging: Staging) -> tuple[int, bool]:
    """The next page with the first shard of a block of this segment; 0: there is none. And whether there is a frame of
    a later release before it."""
    end, step, unknown = nbytes // PAGE, _FIRST_STEP, False
    while page < end:
        length = min(step, (end - page) * PAGE)
        with staging.lend(length) as buffer:
            got = file.read(buffer[:length], page * PAGE) // PAGE
            rows = buffer[: got * PAGE].reshape(got, PAGE)
            for at in (rows[:, : len(MAGIC)] == np.frombuffer(MAGIC, np.uint8)).all(axis=1).nonzero()[0].tolist():
                raw = rows[at].tobytes()
                header = FrameHeader.parse(raw)
                if header is not None and header.segment == segment and header.shard == 0:
                    return page + int(at), unknown
                unknown = unknown or (header is None and is_unknown(raw, segment))
        if got * PAGE < length:
            return 0, unknown
        page, step = page + got, min(2 * step, staging.nbytes)
    return 0, unknown


def ids_of(records: Records) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Block ids, of shape (n, 32)."""
    return np.ascontiguousarray(records["block"]).view(np.uint8).reshape(len(records), 32)
