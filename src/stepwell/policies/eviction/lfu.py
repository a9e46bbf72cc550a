"""Least frequently used, with dynamic ageing (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content
management techniques for web proxy caches", 2000)."""

from __future__ import annotations

from stepwell.policies.eviction.orders.ranked import Ranked
from stepwell.policies.item import Item


class Lfu(Ranked):
    """An item's rank is its number of uses and the age: the rank of what went last, when it was used. So popularity
    of long ago is outlived by what is used now."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def worth(self, item: Item) -> float:
        """Uses, including the one that is being counted."""
        return item.uses + 1

    def refer(self, item: Item, now: float) -> None:
        item.note = self._age + self.worth(item)

    def rank(self, item: Item) -> float:
        rank: float = item.note
        return rank

    def leave(self, item: Item) -> None:
        super().leave(item)
        self._age = max(self._age, item.note)
