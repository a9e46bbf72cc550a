"""Blocks and frames to try things with: several tenants, key epochs, namespaces and segments, made by the very code
that writes them and opened by the very code that reads them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from stepwell.block.layout import SlabLayout
from stepwell.block.namespace import Namespace
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.memory import Bytes, SystemMemory
from stepwell.tiers.base import Incoming, Outgoing, Place, Reading
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

NOW = 1_800_000_000
KEYRING = Keyring(
    (
        TenantKeys("one", (Epoch(2, b"\1" * 32), Epoch(1, b"\2" * 32))),
        TenantKeys("two", (Epoch(1, b"\3" * 32),)),
    )
)
STRANGERS = Keyring(
    (
        TenantKeys("one", (Epoch(2, b"\4" * 32), Epoch(1, b"\5" * 32))),
        TenantKeys("two", (Epoch(1, b"\6" * 32),)),
    )
)
"""The same tenants with other keys."""

_PLAIN = Namespace(b"w" * 32, b"m" * 32, b"l" * 32, 16)
NAMESPACES = (
    _PLAIN,
    Namespace(b"W" * 32, b"m" * 32, b"l" * 32, 16),
    Namespace(b"w" * 32, b"M" * 32, b"l" * 32, 16),
    Namespace(b"w" * 32, b"m" * 32, b"L" * 32, 16),
    Namespace(b"w" * 32, b"m" * 32, b"l" * 32, 32),
    _PLAIN.at_epoch(7),
)
ORIGINS = [(tenant.name, epoch) for tenant in KEYRING.tenants for epoch in range(len(tenant.epochs))]
"""Tenants and which of their epochs, the newest being 0."""


@dataclass(frozen=True, slots=True)
class Block:
    """Number `number` of a tenant's namespace, under one of its keys: numbers in ORIGINS and NAMESPACES."""

    origin: int = 0
    space: int = 0
    number: int = 0


def segment(number: int) -> bytes:
    return blake3(b"segment %d" % number).digest()[:16]


@functools.lru_cache(maxsize=4096)
def content(block: Block, shard: int, nbytes: int) -> Bytes:
    """No two blocks or shards have the same, whatever digests they share."""
    return np.frombuffer(random.Random(repr((block, shard))).randbytes(nbytes), np.uint8)


class Maker:
    """Blocks of `shards` with `nbytes` each. Entries are opened one at a time: their slots are the same ones."""

    def __init__(self, nbytes: int, shards: int = 1, *, sealed: bool, keyring: Keyring = KEYRING) -> None:
        self.nbytes, self.shards = nbytes, shards
        self.sealing = Sealing(keyring, sealed=sealed, wall=lambda: NOW)
        layout = SlabLayout(nbytes, 2 * shards)
        self._slab = Slab(1, Owner("one", b"", nbytes), layout, SystemMemory().make(layout.nbytes))
        self._origins: dict[tuple[int, int], Origin] = {}

    def origin(self, block: Block) -> Origin:
        known = self._origins.get((block.origin, block.space))
        if known is None:
            tenant, epoch = ORIGINS[block.origin]
            known = self.sealing.origins(tenant, NAMESPACES[block.space])[epoch]
            self._origins[block.origin, block.space] = known
        return known

    def entry(self, block: Block, *, outgoing: bool = False) -> Entry:
        first = self.shards if outgoing else 0
        origin = self.origin(block)
        id = origin.name(blake3(b"digest %d" % block.number).digest())
        entry = Entry(id, tuple((self._slab, first + n) for n in range(self.shards)), None)
        entry.origin = origin
        return entry

    def outgoing(self, block: Block) -> Outgoing:
        """To be made before the next one is."""
        entry = self.entry(block, outgoing=True)
        for shard, (slab, slot) in enumerate(entry.slots):
            slab.payload(slot)[:] = content(block, shard, self.nbytes)
        return self.sealing.outgoing(entry)

    def frames(self, block: Block, place: Place) -> list[Bytes]:
        """The parts of its frames: as many as it has shards, where each payload is one chunk."""
        outgoing = self.outgoing(block)
        parts = []
        for part, nbytes in enumerate(outgoing.parts):
            made = np.full(nbytes, 0xEE, np.uint8)
            outgoing.make(part, made, place)
            parts.append(made)
        return parts

    def incoming(self, block: Block) -> Incoming:
        for slot in range(self.shards):
            self._slab.payload(slot)[:] = 0xEE
        return self.sealing.incoming(self.entry(block))

    def slot(self, shard: int) -> Bytes:
        """What was opened last."""
        return self._slab.payload(shard)

    def right(self, block: Block) -> bool:
        """What was opened is what was written of this block."""
        return all((self.slot(n) == content(block, n, self.nbytes)).all() for n in range(self.shards))

    def wiped(self) -> bool:
        return not any(self.slot(n).any() for n in range(self.shards))

    def open(self, block: Block, parts: Sequence[Bytes], segment: bytes) -> Reading:
        """As a tier does: part by part, and wiped when one does not open."""
        incoming = self.incoming(block)
        answer = Reading.GOOD
        for part, frame in enumerate(parts):
            answer = incoming.open(part, frame, segment)
            if answer is not Reading.GOOD:
                incoming.fail()
                break
        return answer
