"""Entries to frames and back: a tier's callbacks, on the tier's threads, and all that it may know of keys.

A frame's identity is its header: block id and namespace tag, both keyed by the tenant, its shard, and the segment that
it was written for. All of it is authenticated with the payload, so nothing else has to be remembered to open a frame,
and nothing opens as something else.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from stepwell.block.frame import (
    AES_256_GCM,
    NO_CODEC,
    NO_PARAMETERS,
    PLAIN,
    FrameHeader,
    frame_bytes,
    frame_parts,
    is_unknown,
)
from stepwell.block.layout import PAGE
from stepwell.block.namespace import Namespace
from stepwell.codecs.base import Codec, name_of
from stepwell.codecs.seal import (
    NO_COMMITMENT,
    ExpectedFrame,
    Opened,
    Opener,
    Sealer,
    SegmentKey,
    expected_of,
    seal,
    unseal,
)
from stepwell.hierarchy.arena.origin import Origin, SegmentKeys
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Entropy
from stepwell.io.memory import Bytes
from stepwell.protocol.messages import CacheGroup
from stepwell.tiers.base import Incoming, Outgoing, Place, Reading
from stepwell.vault.keyring import Keyring

_READINGS = {
    Opened.GOOD: Reading.GOOD,
    Opened.STALE: Reading.ABSENT,
    Opened.FOREIGN: Reading.DAMAGED,
    Opened.UNKNOWN: Reading.UNKNOWN,
    Opened.DAMAGED: Reading.DAMAGED,
}


class _Parts:
    """The parts of a block's frames, one frame a shard: `nbytes` of each, and of which shard and number it is."""

    def __init__(self, payloads: Sequence[int]) -> None:
        frames = [frame_parts(payload) for payload in payloads]
        self.nbytes = tuple(part for parts in frames for part in parts)
        self.of = [(shard, n) for shard, parts in enumerate(frames) for n in range(len(parts))]


_parts = lru_cache(maxsize=64)(_Parts)


def _taken_apart(entry: Entry) -> tuple[Origin, list[Bytes], _Parts]:
    """The entry's origin, its slots, one a shard, and the parts of their frames, which have payloads of its codec."""
    assert entry.origin is not None
    codec, slots = entry.origin.codec, [slab.payload(slot) for slab, slot in entry.slots]
    return (
        entry.origin,
        slots,
        _parts(tuple(codec.payload_bytes(len(s)) if codec is not None else len(s) for s in slots)),
    )


def _coded(origin: Origin) -> tuple[Codec | None, int, bytes]:
    """The codec of the origin's blocks, with its number and parameters."""
    codec = origin.codec
    return (None, NO_CODEC, NO_PARAMETERS) if codec is None else (codec, codec.number, codec.parameters)


class Sealing:
    """Makes what a tier writes and opens what it reads; also the tier's `KeyResolver`. `wall`: Unix seconds.
    `entropy(n)`: n random bytes, for nonces. `codec` encodes on tiers the blocks that it serves; None: none."""

    def __init__(
        self,
        keyring: Keyring,
        *,
        sealed: bool,
        wall: Callable[[], float],
        entropy: Entropy = secrets.token_bytes,
        codec: Codec | None = None,
    ) -> None:
        self._codec = codec
        self._sealed = sealed
        self._wall = wall
        self._entropy = entropy
        self._keyring = keyring
        self._keys = {(t.name, e.number): SegmentKeys(e) for t in keyring.tenants for e in t.epochs}

    def origins(self, tenant: str, namespace: Namespace) -> tuple[Origin, ...]:
        """One for each key epoch of the tenant, newest first, of which new blocks are. Raises AccessDenied SW-607."""
        epochs = self._keyring.tenant(tenant).epochs
        codec = self._codec if namespace.codec else None
        return tuple(Origin(epoch, self._keys[tenant, epoch.number], namespace, codec) for epoch in epochs)

    def codec_name(self, groups: Sequence[CacheGroup]) -> bytes:
        """Name of the codec of blocks whose KV is in these groups, for their namespace; empty: they have none."""
        codec = self._codec
        if codec is None or not groups or not all(codec.serves(group.dtype) for group in groups):
            return b""
        return name_of(codec)

    # blocks -----------------------------------------------------------------------------------------------------------

    def outgoing(self, entry: Entry) -> Outgoing:
        """The entry's slots must not change until it is written: it is leased."""
        origin, slots, parts = _taken_apart(entry)
        codec, number, parameters = _coded(origin)
        sealers: list[Sealer] = []
        payload: list[Bytes] = []  # of the shard that is being made

        def commit(segment: bytes) -> bytes:
            return origin.keys.of(segment).commitment if self._sealed else NO_COMMITMENT

        def make(part: int, into: Bytes, place: Place) -> None:
            shard, n = parts.of[part]
            if not n:
                key = origin.keys.of(place.segment) if self._sealed else None
                identity = (entry.id, origin.tag, shard, len(slots))
                payload[:] = [codec.encode(slots[shard]) if codec is not None else slots[shard]]
                header = self._header(place, part, len(payload[0]), identity, key, entry.position)
                if codec is not None:
                    header = replace(header, raw=len(slots[shard]), codec=number, parameters=parameters)
                sealers.append(Sealer(header, key))
            sealers[shard].make(n, payload[0], into)

        parent = entry.parent.id if entry.parent is not None else None
        return Outgoing(
            entry.id, origin.tag, parts.nbytes, commit, make, codec=number, position=entry.position, parent=parent
        )

    def incoming(self, entry: Entry) -> Incoming:
        """The entry is FILLING, and only this reads or writes its slots. They are zeros unless all is good."""
        origin, slots, parts = _taken_apart(entry)
        codec, number, parameters = _coded(origin)
        openers: list[Opener] = []
        payload: list[Bytes] = []  # of the shard that is being opened

        def open(part: int, frame: Bytes, segment: bytes) -> Reading:
            shard, n = parts.of[part]
            if not n:
                nbytes = len(slots[shard])
                payload[:] = [slots[shard] if codec is None else np.empty(codec.payload_bytes(nbytes), np.uint8)]
                expected = ExpectedFrame(
                    segment, entry.id, origin.tag, shard, len(slots), len(payload[0]), 0, number, parameters
                )
                key, now = origin.keys.of(segment), int(self._wall())
                openers[shard:] = [Opener(expected, key, sealed=self._sealed, now=now)]  # it may be begun again
            opened = openers[shard].open(n, frame, payload[0])
            if opened is Opened.GOOD and codec is not None and n + 1 == len(openers[shard].parts):
                codec.decode(payload[0], slots[shard])
            if opened is Opened.GOOD and openers[shard].position >= 0:
                entry.position = openers[shard].position
            return _READINGS[opened]

        def fail() -> None:
            for slot in slots:
                slot[:] = 0

        return Incoming(entry.id, parts.nbytes, open, fail)

    def _header(
        self,
        place: Place,
        part: int,
        payload: int,
        identity: tuple[bytes, bytes, int, int],
        key: SegmentKey | None,
        position: int,
    ) -> FrameHeader:
        """`identity`: block, namespace, shard, shards."""
        nonce = self._entropy(4) + (place.ordinal + part).to_bytes(8, "big")
        algorithm = PLAIN if key is None else AES_256_GCM
        commitment = NO_COMMITMENT if key is None else key.commitment
        block, tag, shard, shards = identity
        return FrameHeader(
            algorithm, place.segment, commitment, block, tag, nonce, shard, shards, payload, payload, int(self._wall()),
            position=position,
        )  # fmt: skip

    # what a tier may ask ----------------------------------------------------------------------------------------------

    def knows(self, commitment: bytes, segment: bytes) -> bool:
        if commitment == NO_COMMITMENT:
            return not self._sealed  # anybody could have written it
        return self._find(commitment, segment) is not None

    def again(self, commitment: bytes, segment: bytes, other: bytes) -> bytes | None:
        if commitment == NO_COMMITMENT:
            return None if self._sealed else NO_COMMITMENT
        keys = self._find(commitment, segment)
        return keys.of(other).commitment if keys is not None else None

    def remake(self, frames: Bytes, segment: bytes, into: Bytes, place: Place) -> Reading:
        at = part = 0
        while at < len(frames):
            page = frames[at : at + PAGE].tobytes()
            header = FrameHeader.parse(page)
            if header is None or at + frame_bytes(header.payload) > len(frames):
                return Reading.UNKNOWN if header is None and is_unknown(page, segment) else Reading.DAMAGED
            end = at + frame_bytes(header.payload)
            if not self._remake(header, frames[at:end], segment, into[at:end], place, part):
                return Reading.DAMAGED
            at, part = end, part + len(frame_parts(header.payload))
        return Reading.GOOD

    def _remake(self, header: FrameHeader, frame: Bytes, segment: bytes, into: Bytes, place: Place, part: int) -> bool:
        sealed = header.algorithm == AES_256_GCM
        keys = self._find(header.commitment, segment) if sealed else None
        if sealed and keys is None:
            return False
        old = keys.of(segment) if keys is not None else SegmentKey(b"", NO_COMMITMENT)
        new = keys.of(place.segment) if keys is not None else None
        expected = replace(expected_of(header), segment=segment)
        payload = np.empty(header.payload, np.uint8)
        if unseal(frame, expected, old, payload, sealed=self._sealed, now=int(self._wall())) is not Opened.GOOD:
            return False
        identity = (header.block, header.namespace, header.shard, header.shards)
        made = self._header(place, part, header.payload, identity, new, header.position)
        coded = replace(made, group=header.group, raw=header.raw, codec=header.codec, parameters=header.parameters)
        seal(coded, new, payload, into)
        return True

    def _find(self, commitment: bytes, segment: bytes) -> SegmentKeys | None:
        return next((keys for keys in self._keys.values() if keys.of(segment).commitment == commitment), None)
