"""Whose a block is: a namespace under one key of its tenant, which names its blocks and opens their frames."""

from __future__ import annotations

from blake3 import blake3

from stepwell.block.facts import lp
from stepwell.block.namespace import BlockId, Namer, Namespace
from stepwell.codecs.base import Codec
from stepwell.codecs.seal import SegmentKey
from stepwell.vault.keyring import Epoch

_REMEMBERED = 256


class SegmentKeys:
    """One tenant's keys by segment, the last few remembered. Any thread."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._known: dict[bytes, SegmentKey] = {}

    def of(self, segment: bytes) -> SegmentKey:
        key = self._known.get(segment)
        if key is None:
            key = SegmentKey(*self._epoch.segment_key(segment))
            if len(self._known) >= _REMEMBERED:
                self._known = {}
            self._known[segment] = key
        return key


class Origin:
    """One namespace under one key epoch of its tenant: names its blocks and has the keys of their frames. `codec`: the
    namespace's; None: blocks lie on tiers as engines gave them."""

    __slots__ = ("_namer", "codec", "keys", "tag")

    def __init__(self, epoch: Epoch, keys: SegmentKeys, namespace: Namespace, codec: Codec | None = None) -> None:
        self._namer = Namer(epoch.id_key, namespace)
        self.keys = keys
        self.codec = codec
        self.tag = blake3(b"stepwell namespace tag 1" + lp(namespace.encode()), key=epoch.id_key).digest()[:16]

    def name(self, digest: bytes) -> BlockId:
        return self._namer.name(digest)

    def names(self, digests: bytes) -> list[BlockId]:
        """The ids of blocks whose digests follow each other."""
        return self._namer.names(digests)
