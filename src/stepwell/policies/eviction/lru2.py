"""LRU-K with K = 2 (O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD
1993)."""

from __future__ import annotations

from typing import Final

from stepwell.policies.eviction.ranked import Ranked
from stepwell.policies.item import Item

LONG_AGO: Final = 1e9
"""Seconds by which a single use is older than any second use: what was used once goes first, the oldest before."""


class Lru2(Ranked):
    """The one whose last use but one is longest ago."""

    def refer(self, item: Item, now: float) -> None:
        item.note = item.used if item.uses else now - LONG_AGO

    def rank(self, item: Item) -> float:
        before: float = item.note
        return before
