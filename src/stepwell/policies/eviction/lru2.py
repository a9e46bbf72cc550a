"""LRU-K with K = 2 (O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD
1993)."""

from __future__ import annotations

import math

from stepwell.policies.eviction.orders.ranked import Ranked
from stepwell.policies.item import Item


class Lru2(Ranked):
    """The one whose last use but one is longest ago: what was used once goes first, the oldest before."""

    def refer(self, item: Item, now: float) -> None:
        item.note = item.used if item.uses else -math.inf

    def rank(self, item: Item) -> float:
        before: float = item.note
        return before
