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
MAX_TIME = (1 << 32) - 1
"""The latest expiry: what a footer's record has room for."""
MAGIC = b"stepwell"
VERSION = 1

PLAIN, AES_256_GCM = 0, 1
"""Algorithms: xxh3-128 over header and payload (accidents only), or sealed."""

_ALGORITHMS = (PLAIN, AES_256_GCM)
_FIELDS = struct.Struct("<8sHBB4s16s32s32s16s12sHHQQQQ")
_CRC = struct.Struct("<I")
_CRC_AT = PAGE - _CRC.size
_ZEROS = bytes(_CRC_AT - _FIELDS.size)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Header of one frame. `segment`: id of its segment, 16 bytes. `commitment`: to the key, 32 bytes (zeros in plain
    frames). `block`: the block id. `namespace`: keyed tag of the namespace, 16 bytes. `nonce`: 12 bytes, for chunk 0;
    chunk n has one that is larger by n; never used twice with one key. `shard` of `shards`. `payload`: bytes of all
    chunks without tags; `raw`: bytes that they decode to. `created`, `expires`: Unix seconds, 0 for never."""

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
    codecs: bytes = bytes(4)

    def pack(self) -> bytes:
        """The header's page. The whole of it is authenticated together with the payload."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.algorithm, 0, self.codecs, self.segment, self.commitment, self.block, self.namespace,
            self.nonce, self.shard, self.shards, self.payload, self.raw, self.created, self.expires,
        )  # fmt: skip
        page = fields + _ZEROS
        return page + _CRC.pack(zlib.crc32(page))

    @classmethod
    def parse(cls, page: bytes) -> FrameHeader | None:
        """The header in this page; None if there is none, it is damaged, or it has values that no writer of this
        version writes."""
        if len(page) != PAGE or zlib.crc32(page[:_CRC_AT]) != _CRC.unpack_from(page, _CRC_AT)[0]:
            return None
        magic, version, algorithm, flags, codecs, *ids, shard, shards, payload, raw, created, expires = (
            _FIELDS.unpack_from(page)
        )
        sane = (
            magic == MAGIC
            and version == VERSION
            and algorithm in _ALGORITHMS
            and flags == 0
            and codecs == bytes(4)
            and shard < shards <= MAX_SHARDS
            and 0 < payload <= MAX_PAYLOAD
            and raw == payload
            and expires <= MAX_TIME
            and page[_FIELDS.size : _CRC_AT] == _ZEROS
        )
        if not sane:
            return None
        segment, commitment, block, namespace, nonce = ids
        numbers = (shard, shards, payload, raw, created, expires)
        return cls(algorithm, segment, commitment, block, namespace, nonce, *numbers, codecs)


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
