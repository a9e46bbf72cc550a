"""Entries to frames and back: a tier's callbacks, on the tier's threads, and all that it may know of keys.

A frame's identity is its header: block id and namespace tag, both keyed by the tenant, its shard, and the segment that
it was written for. All of it is authenticated with the payload, so nothing else has to be remembered to open a frame,
and nothing opens as something else.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stepwell.block.frame import AES_256_GCM, PLAIN, FrameHeader, frame_bytes, frame_parts, is_unknown
from stepwell.block.layout import PAGE
from stepwell.block.namespace import Namespace
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


def _taken_apart(entry: Entry) -> tuple[Origin, list[Bytes], _Parts]:
    """The entry's origin, its slots, one a shard, and the parts of their frames."""
    assert entry.origin is not None
    slots = [slab.payload(slot) for slab, slot in entry.slots]
    return entry.origin, slots, _Parts([len(slot) for slot in slots])


class Sealing:
    """Makes what a tier writes and opens what it reads; also the tier's `KeyResolver`. `wall`: Unix seconds.
    `entropy(n)`: n random bytes, for nonces."""

    def __init__(
        self,
        keyring: Keyring,
        *,
        sealed: bool,
        wall: Callable[[], float],
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        self._sealed = sealed
        self._wall = wall
        self._entropy = entropy
        self._keyring = keyring
        self._keys = {(t.name, e.number): SegmentKeys(e) for t in keyring.tenants for e in t.epochs}

    def origins(self, tenant: str, namespace: Namespace) -> tuple[Origin, ...]:
        """One for each key epoch of the tenant, newest first, of which new blocks are. Raises AccessDenied SW-607."""
        epochs = self._keyring.tenant(tenant).epochs
        return tuple(Origin(epoch, self._keys[tenant, epoch.number], namespace) for epoch in epochs)

    # blocks -----------------------------------------------------------------------------------------------------------

    def outgoing(self, entry: Entry) -> Outgoing:
        """The entry's slots must not change until it is written: it is leased."""
        origin, slots, parts = _taken_apart(entry)
        sealers: list[Sealer] = []

        def commit(segment: bytes) -> bytes:
            return origin.keys.of(segment).commitment if self._sealed else NO_COMMITMENT

        def make(part: int, into: Bytes, place: Place) -> None:
            shard, n = parts.of[part]
            if not n:
                key = origin.keys.of(place.segment) if self._sealed else None
                identity = (entry.id, origin.tag, shard, len(slots))
                header = self._header(place, part, len(slots[shard]), identity, key, entry.position)
                sealers.append(Sealer(header, key))
            sealers[shard].make(n, slots[shard], into)

        parent = entry.parent.id if entry.parent is not None else None
        return Outgoing(entry.id, origin.tag, parts.nbytes, commit, make, position=entry.position, parent=parent)

    def incoming(self, entry: Entry) -> Incoming:
        """The entry is FILLING, and only this reads or writes its slots. They are zeros unless all is good."""
        origin, slots, parts = _taken_apart(entry)
        openers: list[Opener] = []

        def open(part: int, frame: Bytes, segment: bytes) -> Reading:
            shard, n = parts.of[part]
            if not n:
                expected = ExpectedFrame(segment, entry.id, origin.tag, shard, len(slots), len(slots[shard]))
                key, now = origin.keys.of(segment), int(self._wall())
                openers[shard:] = [Opener(expected, key, sealed=self._sealed, now=now)]  # it may be begun again
            opened = openers[shard].open(n, frame, slots[shard])
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
        plain = np.empty(header.raw, np.uint8)
        if unseal(frame, expected, old, plain, sealed=self._sealed, now=int(self._wall())) is not Opened.GOOD:
            return False
        identity = (header.block, header.namespace, header.shard, header.shards)
        made = self._header(place, part, header.payload, identity, new, header.position)
        seal(replace(made, group=header.group), new, plain, into)
        return True

    def _find(self, commitment: bytes, segment: bytes) -> SegmentKeys | None:
        return next((keys for keys in self._keys.values() if keys.of(segment).commitment == commitment), None)
