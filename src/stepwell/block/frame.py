"""A frame: the self-identifying, checked bytes of one block shard, as they lie on disk or travel.

    header, 4 KiB | chunk 0, tag | chunk 1, tag | ... | zeros up to the next 4 KiB

The payload is cut into chunks of about 1 MiB, each with a tag of 16 bytes, so that each can be read, checked and copied
while it is still in a processor's cache. This module knows the header and the sizes; what chunks and tags
are is a codec's business (`codecs.seal`). The header names everything that must be equal before a byte of the payload
is believed. Drawn in docs/design/format.md and guarded by golden files.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

from stepwell.block.layout import PAGE, GiB

TAG = 16
CHUNK = (1 << 20) + PAGE - TAG
"""Bytes of payload in each chunk but the last: with its tag whole pages, and payloads of 2^n MiB make 2^n chunks."""

MAX_PAYLOAD = GiB
MAX_SHARDS = 4096
MAX_POSITION = 1 << 32
MAX_TIME = (1 << 32) - 1
"""The latest expiry: what a footer's record has room for."""
MAGIC = b"stepwell"
VERSION = 2
"""Version that is written. Version 1, which is read too, has no codec, group and position."""

NO_CODEC, NO_PARAMETERS = 0, bytes(16)
"""The payload is as the engine gave it."""

CODECS = (NO_CODEC,)
"""Numbers of the codecs that this release knows, each below 32. A frame with any other is unknown."""

PLAIN, AES_256_GCM = 0, 1
"""Algorithms: xxh3-128 over header and payload (accidents only), or sealed."""

_ALGORITHMS = (PLAIN, AES_256_GCM)
_VERSIONS = (1, VERSION)
_FIELDS = struct.Struct("<8sHBBHH16s32s32s16s12sHHQQQQQ16s")
_CRC = struct.Struct("<I")
_CRC_AT = PAGE - _CRC.size
_ZEROS = bytes(_CRC_AT - _FIELDS.size)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Header of one frame. `segment`: id of its segment, 16 bytes. `commitment`: to the key, 32 bytes (zeros in plain
    frames). `block`: the block id. `namespace`: keyed tag of the namespace, 16 bytes. `nonce`: 12 bytes, for chunk 0;
    chunk n has one that is larger by n; never used twice with one key. `shard` of `shards`. `payload`: bytes of all
    chunks without tags; `raw`: bytes that they decode to. `created`, `expires`: Unix seconds, 0 for never. `codec`: how
    the payload is encoded, with a digest of its `parameters`, 16 bytes. `group`: the cache group whose KV this is.
    `position`: blocks before this one in its prefix; -1 where that is not known."""

    algorithm: int
    segment: bytes
    commitment: bytes
    block: bytes
    namespace: bytes
    nonce: bytes
    shard: int
    shards: int
    payload: int
    raw: int
    created: int
    expires: int = 0
    codec: int = NO_CODEC
    parameters: bytes = NO_PARAMETERS
    group: int = 0
    position: int = -1

    def pack(self) -> bytes:
        """The header's page. The whole of it is authenticated together with the payload."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.algorithm, 0, self.codec, self.group, self.segment, self.commitment, self.block,
            self.namespace, self.nonce, self.shard, self.shards, self.payload, self.raw, self.created, self.expires,
            self.position + 1, self.parameters,
        )  # fmt: skip
        page = fields + _ZEROS
        return page + _CRC.pack(zlib.crc32(page))

    @classmethod
    def parse(cls, page: bytes) -> FrameHeader | None:
        """The header in this page; None if there is none, it is damaged, or it has values that no writer of versions 1
        and 2 writes (see `is_unknown`)."""
        if not _is_whole(page):
            return None
        magic, version, algorithm, flags, codec, group, *rest = _FIELDS.unpack_from(page)
        *ids, shard, shards, payload, raw, created, expires, position, parameters = rest
        sane = (
            magic == MAGIC
            and version in _VERSIONS
            and algorithm in _ALGORITHMS
            and flags == 0
            and codec in CODECS
            and (codec != NO_CODEC or (parameters == NO_PARAMETERS and raw == payload))
            and position <= MAX_POSITION
            and (version > 1 or not (group or position))
            and shard < shards <= MAX_SHARDS
            and 0 < payload <= MAX_PAYLOAD
            and 0 < raw <= MAX_PAYLOAD
            and expires <= MAX_TIME
            and page[_FIELDS.size : _CRC_AT] == _ZEROS
        )
        if not sane:
            return None
        segment, commitment, block, namespace, nonce = ids
        numbers = (shard, shards, payload, raw, created, expires)
        return cls(
            algorithm, segment, commitment, block, namespace, nonce, *numbers, codec, parameters, group, position - 1
        )


def _is_whole(page: bytes) -> bool:
    return len(page) == PAGE and zlib.crc32(page[:_CRC_AT]) == _CRC.unpack_from(page, _CRC_AT)[0]


def is_unknown(page: bytes, segment: bytes) -> bool:
    """This page is the header of a frame that a later release wrote: whole, of a version that is not read here, or of
    this segment and with an algorithm, a flag or a codec that is unknown here. Such a frame is kept as it is."""
    if not _is_whole(page):
        return False
    magic, version, algorithm, flags, codec, _, written_for, *_ = _FIELDS.unpack_from(page)
    unknown = algorithm not in _ALGORITHMS or flags != 0 or codec not in CODECS
    return magic == MAGIC and (version not in _VERSIONS or (unknown and written_for == segment))


@lru_cache(maxsize=256)  # asked for several times with every block
def frame_parts(payload: int) -> tuple[int, ...]:
    """Bytes of the parts of a frame with this payload, whole pages each. A part has one chunk and its tag; the header's
    page comes with the first, the padding with the last."""
    chunks = -(-payload // CHUNK)
    last = payload - (chunks - 1) * CHUNK + TAG
    parts = [*[CHUNK + TAG] * (chunks - 1), -(-last // PAGE) * PAGE]
    parts[0] += PAGE
    return tuple(parts)


def frame_bytes(payload: int) -> int:
    """Bytes of a frame with this payload, a multiple of 4 KiB."""
    return sum(frame_parts(payload))
