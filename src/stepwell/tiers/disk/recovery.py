"""What an earlier life left in a directory: read from footers, or, where a segment was still open, from its frames.

Nothing here is believed: places that it yields are hints, and each frame proves itself when it is read. What is not
understood is counted and left alone.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from stepwell.block.frame import MAGIC, FrameHeader, frame_bytes
from stepwell.block.layout import PAGE
from stepwell.io.files import File
from stepwell.io.staging import Staging
from stepwell.tiers.disk.index import PAGES
from stepwell.tiers.disk.layout import MAX_KEYS, RECORD, Footer, Head, OtherVersion, Records, Trailer

NAME = re.compile(r"[0-9a-f]{16}\.seg")
LOCK, README = "lock", "README.txt"
OURS = (LOCK, README)
_FIRST_STEP = 64 << 10


MOST_BYTES = PAGES * PAGE
"""Of a segment: what the index can name."""


class NotAFile(OSError):
    """Something else has the name of a segment: a link, a directory, a device."""


class Opener(Protocol):
    """What looking takes of `Files`."""

    def open(self, name: str) -> File: ...


class Kind(Enum):
    GOOD = "good"  # records are those of its footer, or of its frames
    EMPTY = "empty"  # made and never written: it holds no data at all
    OTHER_VERSION = "other_version"
    HEADLESS = "headless"  # ours, as its trailer says, with a damaged head
    STRANGE = "strange"  # nothing that we have written, as far as can be told


@dataclass(frozen=True, slots=True)
class Found:
    """One file. `footer` has the blocks of a GOOD one; `closed`: it lay there as such, else it was put together from
    frames. `nbytes` of the file."""

    name: str
    kind: Kind
    nbytes: int
    head: Head | None = None
    footer: Footer | None = None
    closed: bool = False


def look(files: Opener, name: str, staging: Staging) -> Found:
    """Reads one segment file's head and index. Blocking; raises OSError, `NotAFile` where it is something else."""
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
            return Found(name, Kind.OTHER_VERSION, nbytes)
    finally:
        file.close()


def _look(file: File, name: str, nbytes: int, staging: Staging) -> Found:
    with staging.lend(PAGE) as buffer:
        got = file.read(buffer[:PAGE], 0)
        page = buffer[:got].tobytes()
    head = Head.parse(page)
    if head is None or nbytes > MOST_BYTES:
        return Found(name, _headless(file, nbytes, staging), nbytes)
    if head.nbytes == nbytes:
        footer = read_footer(file, head.id, staging)
        if footer is not None:
            return Found(name, Kind.GOOD, nbytes, head, footer, closed=True)
    return Found(name, Kind.GOOD, nbytes, head, _scan(file, head.id, nbytes, staging))


def _headless(file: File, nbytes: int, staging: Staging) -> Kind:
    if nbytes and nbytes % PAGE == 0 and file.blank():
        return Kind.EMPTY
    return Kind.HEADLESS if _read_trailer(file, nbytes // PAGE * PAGE, staging) is not None else Kind.STRANGE


def _read_trailer(file: File, end: int, staging: Staging) -> Trailer | None:
    with staging.lend(PAGE) as buffer:
        if end < 2 * PAGE or file.read(buffer[:PAGE], end - PAGE) != PAGE:
            return None
        return Trailer.parse(buffer[:PAGE].tobytes())


def read_footer(file: File, segment: bytes, staging: Staging) -> Footer | None:
    """The footer of a closed segment; None if it has none that is whole and of this life of the file."""
    end = file.size() // PAGE * PAGE
    trailer = _read_trailer(file, end, staging)
    if trailer is None or trailer.segment != segment or trailer.nbytes > end - 2 * PAGE:
        return None
    with staging.lend(trailer.nbytes) as buffer:
        raw = buffer[: trailer.nbytes]
        if trailer.nbytes and file.read(raw, end - PAGE - trailer.nbytes) != trailer.nbytes:
            return None
        return trailer.footer(raw.tobytes(), end // PAGE)


def _scan(file: File, segment: bytes, nbytes: int, staging: Staging) -> Footer:
    """The blocks of a segment that was open, header by header. Writes were under way side by side, so a gap may come
    before the last of them; and a sweep leaves zeros, as many as a segment has."""
    records: list[tuple[bytes, bytes, int, int, int, int]] = []
    keys: dict[bytes, int] = {}
    page, first, shards = 1, 1, 0
    with staging.lend(PAGE) as buffer:
        while (page + 1) * PAGE <= nbytes and file.read(buffer[:PAGE], page * PAGE) == PAGE:
            header = FrameHeader.parse(buffer[:PAGE].tobytes())
            if header is None or header.segment != segment or header.shard != shards:
                page = _beyond_gap(file, segment, max(page, first) + 1, nbytes, staging)
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
            first, shards = page, 0
    return Footer(segment, np.array(records, RECORD), tuple(keys))


def _beyond_gap(file: File, segment: bytes, page: int, nbytes: int, staging: Staging) -> int:
    """The next page that begins with this segment's first shard of a block; 0: there is none."""
    end, step = nbytes // PAGE, _FIRST_STEP
    while page < end:
        length = min(step, (end - page) * PAGE)
        with staging.lend(length) as buffer:
            got = file.read(buffer[:length], page * PAGE) // PAGE
            rows = buffer[: got * PAGE].reshape(got, PAGE)
            for at in (rows[:, : len(MAGIC)] == np.frombuffer(MAGIC, np.uint8)).all(axis=1).nonzero()[0].tolist():
                header = FrameHeader.parse(rows[at].tobytes())
                if header is not None and header.segment == segment and header.shard == 0:
                    return page + int(at)
        if got * PAGE < length:
            return 0
        page, step = page + got, min(2 * step, staging.nbytes)
    return 0


def ids_of(records: Records) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Block ids, of shape (n, 32)."""
    return np.ascontiguousarray(records["block"]).view(np.uint8).reshape(len(records), 32)
