"""Least recently used: what vLLM, SGLang and most offloading tiers do."""

from __future__ import annotations

from stepwell.policies.eviction.orders.ranked import Ranked
from stepwell.policies.item import Item


class Lru(Ranked):
    """The one whose last use is longest ago."""

    def rank(self, item: Item) -> float:
        return item.used
