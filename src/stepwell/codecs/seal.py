"""Making and opening frames: the copy between a slot and a buffer, which seals or checks on its way.

AES-256-GCM with the whole header as associated data: a frame opens only as what its header says it is, under the key
that the header commits to. Plain frames carry an xxh3-128 of header and payload instead, against accidents only.
Opening writes into memory that nobody reads yet, and wipes it if the tag does not hold: until then it already has the
plaintext (measured).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stepwell.block.frame import AES_256_GCM, PAGE, PLAIN, TAG, FrameHeader, frame_bytes

Bytes = npt.NDArray[np.uint8]
NO_COMMITMENT = bytes(32)


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """A tenant's key for one segment and what commits to it, 32 bytes each."""

    key: bytes = field(repr=False)
    commitment: bytes


class Opened(Enum):
    """What came of opening a frame. The values are metric labels."""

    GOOD = "good"
    STALE = "stale"  # a whole frame, of another segment: its place was written anew
    FOREIGN = "foreign"  # of another block, namespace, key, algorithm or shape than was asked for
    DAMAGED = "damaged"  # no frame, or its tag does not hold


@dataclass(frozen=True, slots=True)
class Expected:
    """What a frame must say of itself to be believed."""

    segment: bytes
    block: bytes
    namespace: bytes
    shard: int
    shards: int
    raw: int


def seal(header: FrameHeader, key: SegmentKey | None, payload: Bytes, into: Bytes) -> None:
    """Writes the frame to `into`, which has `frame_bytes(header.payload)` bytes. `key` None: plain."""
    page = header.pack()
    end = PAGE + header.payload
    into[:PAGE] = np.frombuffer(page, np.uint8)
    if key is None:
        np.copyto(into[PAGE:end], payload)
        into[end : end + TAG] = np.frombuffer(_sum(page, into[PAGE:end]), np.uint8)
    else:
        AESGCM(key.key).encrypt_into(header.nonce, payload.data, page, into[PAGE : end + TAG].data)
    into[end + TAG :] = 0


def unseal(frame: Bytes, expected: Expected, key: SegmentKey, into: Bytes, *, sealed: bool, now: int) -> Opened:
    """Opens the frame into `into`, which has `expected.raw` bytes; they are zeros unless the answer is GOOD.

    `sealed`: refuses plain frames, which anybody could have written. `now`: Unix seconds, for its expiry.
    """
    verdict = _unseal(frame, expected, key, into, sealed, now)
    if verdict is not Opened.GOOD:
        into[:] = 0
    return verdict


def _unseal(frame: Bytes, expected: Expected, key: SegmentKey, into: Bytes, sealed: bool, now: int) -> Opened:
    page = frame[:PAGE].tobytes()
    header = FrameHeader.parse(page)
    if header is None or len(frame) < frame_bytes(header.payload):
        return Opened.DAMAGED
    if header.segment != expected.segment:
        return Opened.STALE
    said = Expected(header.segment, header.block, header.namespace, header.shard, header.shards, header.raw)
    commitment = key.commitment if header.algorithm == AES_256_GCM else NO_COMMITMENT
    if said != expected or header.commitment != commitment or (sealed and header.algorithm == PLAIN):
        return Opened.FOREIGN
    if header.expires and header.expires <= now:
        return Opened.STALE
    end = PAGE + header.payload
    if header.algorithm == PLAIN:
        np.copyto(into, frame[PAGE:end])
        return Opened.GOOD if _sum(page, into) == frame[end : end + TAG].tobytes() else Opened.DAMAGED
    try:
        AESGCM(key.key).decrypt_into(header.nonce, frame[PAGE : end + TAG].data, page, into.data)
    except InvalidTag:
        return Opened.DAMAGED
    return Opened.GOOD


def _sum(page: bytes, payload: Bytes) -> bytes:
    hasher = xxhash.xxh3_128(page)
    hasher.update(payload.data)
    return hasher.digest()
