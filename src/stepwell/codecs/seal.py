"""Making and opening frames, part by part: the copy between a slot and a buffer, which seals or checks on its way.

AES-256-GCM, chunk by chunk, with the whole header as associated data: a frame opens only as what its header says it is,
under the key that the header commits to. Chunks have nonces one after the other, so that none passes for another. Plain
frames carry an xxh3-128 of header, number and content of each chunk instead, against accidents only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stepwell.block.frame import (
    AES_256_GCM,
    CHUNK,
    NO_CODEC,
    NO_PARAMETERS,
    PLAIN,
    TAG,
    FrameHeader,
    frame_parts,
    is_unknown,
)
from stepwell.block.layout import PAGE
from stepwell.io.memory import Bytes

NO_COMMITMENT = bytes(32)


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """A tenant's key for one segment and what commits to it, 32 bytes each."""

    key: bytes | memoryview = field(repr=False)
    commitment: bytes


class Opened(Enum):
    """Result of opening a part of a frame. The values are metric labels."""

    GOOD = "good"
    STALE = "stale"  # a whole header, of another segment: its place was written anew; or it has expired
    FOREIGN = "foreign"  # it has another block, namespace, key, algorithm or shape than expected
    UNKNOWN = "unknown"  # a later release wrote it: it is neither read nor touched
    DAMAGED = "damaged"  # no frame, or a tag does not hold


@dataclass(frozen=True, slots=True)
class ExpectedFrame:
    """Fields that a frame's header must have to be accepted."""

    segment: bytes
    block: bytes
    namespace: bytes
    shard: int
    shards: int
    payload: int
    group: int = 0
    codec: int = NO_CODEC
    parameters: bytes = NO_PARAMETERS


class Sealer:
    """Makes one frame. `key` None: plain."""

    def __init__(self, header: FrameHeader, key: SegmentKey | None) -> None:
        self.parts = frame_parts(header.payload)
        self._header = header
        self._page = header.pack()
        self._cipher = AESGCM(key.key) if key is not None else None

    def make(self, part: int, payload: Bytes, into: Bytes) -> None:
        """Writes the part to `into`, which has `parts[part]` bytes. `payload` is the whole frame's."""
        at = 0
        if not part:
            into[:PAGE] = np.frombuffer(self._page, np.uint8)
            at = PAGE
        chunk = payload[part * CHUNK : (part + 1) * CHUNK]
        end = at + len(chunk)
        if self._cipher is None:
            np.copyto(into[at:end], chunk)
            into[end : end + TAG] = np.frombuffer(_sum(self._page, part, into[at:end]), np.uint8)
        else:
            self._cipher.encrypt_into(
                _nonce(self._header.nonce, part), chunk.data, self._page, into[at : end + TAG].data
            )
        if end + TAG < len(into):
            into[end + TAG :] = 0


class Opener:
    """Opens one frame into memory that has no other reader yet. The memory holds plaintext before a tag is checked
    (measured), so the caller wipes it if any part is not GOOD. `sealed`: refuses plain frames, which any user could
    have written. `now`: Unix seconds, to tell whether it has expired."""

    def __init__(self, expected: ExpectedFrame, key: SegmentKey, *, sealed: bool, now: int) -> None:
        self.parts = frame_parts(expected.payload)
        self._expected = expected
        self._key = key
        self._sealed = sealed
        self._now = now
        self._header: FrameHeader | None = None
        self._page = b""
        self._cipher: AESGCM | None = None

    @property
    def position(self) -> int:
        """Of the block in its prefix, once the first part is open; -1 where the frame does not say it."""
        return self._header.position if self._header is not None else -1

    def open(self, part: int, frame: Bytes, into: Bytes) -> Opened:
        """Opens the part `frame`, of `parts[part]` bytes, in order. `into` takes the whole frame's payload."""
        at = 0
        if not part:
            verdict = self._examine(frame[:PAGE].tobytes())
            if verdict is not Opened.GOOD:
                return verdict
            at = PAGE
        assert self._header is not None
        chunk = into[part * CHUNK : (part + 1) * CHUNK]
        end = at + len(chunk)
        if end + TAG < len(frame) and frame[end + TAG :].any():
            return Opened.DAMAGED  # padding is zeros: so every bit of a frame is checked
        if self._cipher is None:
            np.copyto(chunk, frame[at:end])
            good = _sum(self._page, part, chunk) == frame[end : end + TAG].tobytes()
            return Opened.GOOD if good else Opened.DAMAGED
        try:
            nonce = _nonce(self._header.nonce, part)
            self._cipher.decrypt_into(nonce, frame[at : end + TAG].data, self._page, chunk.data)
        except InvalidTag:
            return Opened.DAMAGED
        return Opened.GOOD

    def _examine(self, page: bytes) -> Opened:
        header = FrameHeader.parse(page)
        if header is None:
            return Opened.UNKNOWN if is_unknown(page, self._expected.segment) else Opened.DAMAGED
        expected = self._expected
        if header.segment != expected.segment:
            return Opened.STALE
        said = expected_of(header)
        commitment = self._key.commitment if header.algorithm == AES_256_GCM else NO_COMMITMENT
        plain = header.algorithm == PLAIN
        if said != expected or header.commitment != commitment or (self._sealed and plain):
            return Opened.FOREIGN
        if header.expires and header.expires <= self._now:
            return Opened.STALE
        self._header, self._page = header, page
        self._cipher = None if plain else AESGCM(self._key.key)
        return Opened.GOOD


def expected_of(header: FrameHeader) -> ExpectedFrame:
    """What a frame with this header is."""
    return ExpectedFrame(
        header.segment, header.block, header.namespace, header.shard, header.shards, header.payload, header.group,
        header.codec, header.parameters,
    )  # fmt: skip


def seal(header: FrameHeader, key: SegmentKey | None, payload: Bytes, into: Bytes) -> None:
    """Makes the whole frame in `into`, which has `frame_bytes(header.payload)` bytes. `key` None: plain."""
    sealer, at = Sealer(header, key), 0
    for part, nbytes in enumerate(sealer.parts):
        sealer.make(part, payload, into[at : at + nbytes])
        at += nbytes


def unseal(frame: Bytes, expected: ExpectedFrame, key: SegmentKey, into: Bytes, *, sealed: bool, now: int) -> Opened:
    """Opens the whole frame into `into`, which has `expected.payload` bytes: zeros unless the answer is GOOD."""
    opener, at, verdict = Opener(expected, key, sealed=sealed, now=now), 0, Opened.GOOD
    for part, nbytes in enumerate(opener.parts):
        whole = at + nbytes <= len(frame)
        verdict = opener.open(part, frame[at : at + nbytes], into) if whole else Opened.DAMAGED
        if verdict is not Opened.GOOD:
            into[:] = 0
            break
        at += nbytes
    return verdict


def _nonce(first: bytes, part: int) -> bytes:
    return first[:4] + (int.from_bytes(first[4:], "big") + part).to_bytes(8, "big")


def _sum(page: bytes, part: int, chunk: Bytes) -> bytes:
    hasher = xxhash.xxh3_128(page)
    hasher.update(part.to_bytes(8, "big"))
    hasher.update(chunk.data)
    return hasher.digest()
