"""Sizes: the number of tokens of a block, and the division of a slab into slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

MIN_SHARD = 512 << 10
"""Below this the data path loses to per-piece costs (measured; docs/design/sizes.md)."""

MIN_BLOCK_TOKENS = 128
"""Smaller blocks make a lookup of a long prompt too long: each costs the well the same, whatever it holds."""

MAX_DEFAULT_SHARD = 32 << 20
"""Bytes beyond which no shard grows for the sake of MIN_BLOCK_TOKENS: a slab has eight, host memory several slabs."""

PAGE = 4096
"""Unit of all places and lengths, in memory and on disk."""

MiB = 1 << 20
GiB = 1 << 30

MIN_SLAB = 16 * MiB


def block_tokens_for(engine_page: int, page_shard_bytes: int) -> int:
    """The block size in tokens: `engine_page` x 2^k with the smallest k for which a shard has at least 512 KiB, and a
    block 128 tokens unless its shard would have more than 32 MiB."""
    pages = 1
    while pages * page_shard_bytes < MIN_SHARD or (
        pages * engine_page < MIN_BLOCK_TOKENS and 2 * pages * page_shard_bytes <= MAX_DEFAULT_SHARD
    ):
        pages *= 2
    return engine_page * pages


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class SlabLayout:
    """Bytes of one slab of the arena.

    0 ── generation words, 8 bytes a slot ── offset ── slot 0 ── offset + stride ── slot 1 ── ... ── nbytes
    """

    slot_bytes: int
    slots: int

    @cached_property
    def offset(self) -> int:
        return _up(8 * self.slots, PAGE)

    @cached_property
    def stride(self) -> int:
        return _up(self.slot_bytes, PAGE)

    @cached_property
    def nbytes(self) -> int:
        return self.offset + self.slots * self.stride

    @staticmethod
    @lru_cache(maxsize=256)  # asked for with every block that is reserved
    def within(host_bytes: int, slot_bytes: int, least_bytes: int = MIN_SLAB) -> SlabLayout:
        """A slab of host/16, at least 8 slots and `least_bytes`, at most 1 GiB, and never more than host; as much
        larger as gives so many slabs all of host.

        A slab with no slot at all means that host cannot hold even one.
        """
        stride = _up(slot_bytes, PAGE)
        eight = SlabLayout(slot_bytes, 8).nbytes
        most = max(GiB, eight)
        target = max(1, min(max(host_bytes // 16, eight, least_bytes), most, host_bytes))
        target = min(host_bytes // (host_bytes // target or 1), most)
        slots = max(0, (target - PAGE) // stride)
        while slots and SlabLayout(slot_bytes, slots).nbytes > target:
            slots -= 1
        return SlabLayout(slot_bytes, slots)
