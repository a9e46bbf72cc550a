"""Namespaces and block ids: the identity of blocks.

A namespace is everything that must be equal for the bytes of two blocks to be interchangeable, the token prefix aside.
A block id is keyed with the tenant's id key, so that it reveals its prompt to no one without the key; it is made only
in the well. Recipe: docs/design/identity.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

from blake3 import blake3

from stepwell.block.facts import lp

BlockId = NewType("BlockId", bytes)

DEFAULT_TENANT = "default"
"""The tenant of the well's own user, and of wells that know no other."""

LOADED_FROM_FILES = 0
"""Weights epoch of weights as they lie in their files; every reset draws another one at random."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One model as one engine runs it. All three digests are 32 bytes.

    weights: contents of the weight files.
    model: the effective model config (after overrides, with RoPE, windows, quantisation, dtypes).
    layout: shape, order, ranks, backend or ISA, engine version: what the bytes of a shard look like.
    epoch: 0 as loaded from files, random after each update in memory.
    block_tokens: tokens in a block.
    codec: how its blocks are encoded on tiers; empty: not at all.
    """

    weights: bytes
    model: bytes
    layout: bytes
    block_tokens: int
    epoch: int = LOADED_FROM_FILES
    codec: bytes = b""

    def at_epoch(self, epoch: int) -> Namespace:
        return replace(self, epoch=epoch)

    def encode(self) -> bytes:
        """Unambiguous bytes: every variable part is length-prefixed."""
        numbers = self.epoch.to_bytes(8, "big") + self.block_tokens.to_bytes(4, "big")
        coded = lp(self.codec) if self.codec else b""
        return lp(self.weights) + lp(self.model) + lp(self.layout) + lp(numbers) + coded


def layout_of_session(scheduler: bytes, workers: Sequence[bytes], shard_bytes: int, replicas: int = 1) -> bytes:
    """The session's layout digest, from the layouts that its members report, ranks in order. `replicas`: ranks that
    share a shard; with as many shards as ranks the digest is the same as before there were replicas."""
    parts = [lp(scheduler), *(lp(w) for w in workers), lp(shard_bytes.to_bytes(8, "big"))]
    if replicas > 1:
        parts.append(lp(b"replicas") + lp(replicas.to_bytes(8, "big")))
    return blake3(b"stepwell session layout 1" + b"".join(parts)).digest()


class Namer:
    """Turns digests into block ids of one namespace under one id key (0.5 us each)."""

    __slots__ = ("_seeded",)

    def __init__(self, id_key: bytes | memoryview, namespace: Namespace) -> None:
        self._seeded = blake3(lp(namespace.encode()), key=id_key)

    def name(self, digest: bytes) -> BlockId:
        """The block id of a digest: BLAKE3.keyed(id_key, lp(namespace) || digest)."""
        return BlockId(self._seeded.copy().update(digest).digest())

    def names(self, digests: bytes) -> list[BlockId]:
        """The block ids of digests that follow each other."""
        copy = self._seeded.copy
        return [BlockId(copy().update(digests[at : at + 32]).digest()) for at in range(0, len(digests), 32)]
