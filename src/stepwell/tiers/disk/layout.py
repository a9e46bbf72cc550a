"""Layout of a segment file: a head of one page, frames, and, once it is closed, an index at its end.

    page 0: head | frames, each whole pages ... | (unused) | records, 64 bytes each, padded | last page: trailer

Head and trailer carry the segment's id, which is new with every life of the file, so that frames of an earlier life are
never taken for this one's. Records are a hint (each frame proves itself), so a checksum against accidents is enough.
Drawn in docs/design/format.md and guarded by golden files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.block.frame import CODECS, NO_CODEC
from stepwell.block.layout import PAGE

VERSION = 2
"""Version that is written, with frames of version 2; 1 is read too. A segment of any other is left alone as a whole."""

_VERSIONS = (1, VERSION)
KNOWN_CODECS, FLAGS = sum(1 << codec for codec in CODECS), 0
"""What frames that this release reads may have: bit n of KNOWN_CODECS is codec n, FLAGS all of their flags."""

MAX_SEQUENCE = 1 << 63
"""Exclusive. No clock reaches it, and a segment after it could not be numbered."""

MAX_KEYS = 60
"""Most keys in one segment; one that would need more is closed early."""

RECORD = np.dtype(
    [("block", "V32"), ("namespace", "V16"), ("page", "<u4"), ("pages", "<u4"), ("key", "<u4"), ("expires", "<u4")]
)
"""One block: first page, number of pages of all its frames, index of its key among the trailer's commitments, and the
Unix second of its expiry (0: never)."""

Records = npt.NDArray[np.void]

_HEAD = struct.Struct("<8sH6x16sQQQ")
_TRAILER = struct.Struct("<8sH6x16sQQ16sIII")
_CRC = struct.Struct("<I")
_CRC_AT = PAGE - _CRC.size
_HEAD_MAGIC, _TRAILER_MAGIC = b"stepwseg", b"stepwidx"
_KEYS_AT = 128


@dataclass(frozen=True, slots=True)
class Head:
    """The first page. `id`: 16 bytes. `sequence`: larger for each new segment, so the oldest has the smallest.
    `nbytes`: size of the file. `created`: Unix seconds."""

    id: bytes
    sequence: int
    nbytes: int
    created: int
    version: int = VERSION

    def pack(self) -> bytes:
        return _page(_HEAD.pack(_HEAD_MAGIC, self.version, self.id, self.sequence, self.nbytes, self.created))

    @classmethod
    def parse(cls, page: bytes) -> Head | None:
        """The head in a page; None if there is none or it is damaged. Raises `OtherVersion`."""
        fields = _checked(page, _HEAD, _HEAD_MAGIC)
        head = cls(*fields) if fields is not None else None
        return head if head is not None and head.sequence < MAX_SEQUENCE else None


class OtherVersion(Exception):
    """The segment has a version of the format that this release does not read."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The index of a closed segment. `commitments`: 32 bytes for each key. `codecs`, `flags`: those of its frames; 0
    on disk in segments of version 1. `version`: that of the segment's head, so that the release that began the segment
    reads all of it."""

    segment: bytes
    records: Records
    commitments: tuple[bytes, ...]
    codecs: int = 1 << NO_CODEC
    flags: int = FLAGS
    version: int = VERSION

    @property
    def understood(self) -> bool:
        """This release reads all frames of the segment."""
        return not (self.codecs & ~KNOWN_CODECS or self.flags & ~FLAGS)

    @staticmethod
    def nbytes(count: int) -> int:
        """Size of a footer with `count` records: whole pages, the trailer included."""
        return -(-count * RECORD.itemsize // PAGE) * PAGE + PAGE

    def pack(self) -> bytes:
        """The footer's bytes, to be written at the very end of the file."""
        raw = self.records.tobytes()
        padded = raw + bytes(-len(raw) % PAGE)
        codecs, flags = (self.codecs, self.flags) if self.version > 1 else (0, 0)
        head = _TRAILER.pack(
            _TRAILER_MAGIC, self.version, self.segment, len(self.records), len(padded), xxhash.xxh3_128_digest(padded),
            len(self.commitments), codecs, flags,
        )  # fmt: skip
        return padded + _page(head.ljust(_KEYS_AT, b"\0") + b"".join(self.commitments))


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a closed segment: `count` records in the `nbytes` bytes before it."""

    segment: bytes
    count: int
    nbytes: int
    checksum: bytes
    commitments: tuple[bytes, ...]
    codecs: int
    flags: int

    @classmethod
    def parse(cls, page: bytes) -> Trailer | None:
        """The trailer in a page; None if there is none or it is damaged. Raises `OtherVersion`."""
        fields = _checked(page, _TRAILER, _TRAILER_MAGIC)
        if fields is None:
            return None
        segment, count, nbytes, checksum, keys, codecs, flags, _ = fields
        if keys > MAX_KEYS or nbytes != Footer.nbytes(count) - PAGE:
            return None
        commitments = tuple(page[_KEYS_AT + 32 * n : _KEYS_AT + 32 * n + 32] for n in range(keys))
        return cls(segment, count, nbytes, checksum, commitments, codecs, flags)

    def footer(self, raw: bytes, pages: int) -> Footer | None:
        """The footer with the records in `raw`; None unless they match the checksum, are complete, and fit a segment of
        `pages` pages."""
        if len(raw) != self.nbytes or xxhash.xxh3_128_digest(raw) != self.checksum:
            return None
        if raw[self.count * RECORD.itemsize :].strip(b"\0"):  # a count that is too small would hide blocks
            return None
        records = np.frombuffer(raw, RECORD, self.count)
        first, length = records["page"].astype(np.int64), records["pages"].astype(np.int64)
        fits = (first > 0) & (length > 0) & (first + length <= pages) & (records["key"] < len(self.commitments))
        found = Footer(self.segment, records, self.commitments, self.codecs, self.flags)
        return found if bool(fits.all()) else None


def gaps(records: Records, end: int) -> Iterator[tuple[int, int]]:
    """(first page, pages) of each stretch between the head and page `end` that no record covers."""
    at = 1
    for page, pages in sorted(zip(records["page"].tolist(), records["pages"].tolist(), strict=True)):
        if page > at:
            yield at, page - at
        at = max(at, page + pages)
    if at < end:
        yield at, end - at


def _page(fields: bytes) -> bytes:
    page = fields.ljust(_CRC_AT, b"\0")
    return page + _CRC.pack(zlib.crc32(page))


def _checked(page: bytes, fields: struct.Struct, magic: bytes) -> tuple[Any, ...] | None:
    """The fields behind the version, then the version."""
    if len(page) != PAGE or zlib.crc32(page[:_CRC_AT]) != _CRC.unpack_from(page, _CRC_AT)[0]:
        return None
    found, version, *rest = fields.unpack_from(page)
    if found != magic:
        return None
    if version not in _VERSIONS:
        raise OtherVersion
    return (*rest, version)
