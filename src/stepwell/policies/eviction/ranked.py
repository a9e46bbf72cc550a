"""Policies that give each item a rank that grows when it is used: the lowest goes."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.item import Item


class Ranks:
    """A heap with one record for each listed item. An item that was used since moves back when its record comes to the
    top, so that a use costs nothing here and the heap never outgrows the items."""

    __slots__ = ("_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._sequence = 0

    def push(self, item: Item, rank: float) -> None:
        item.listed = True
        self._sequence += 1
        heapq.heappush(self._heap, (rank, self._sequence, item))

    def top(self) -> tuple[float, Item] | None:
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def pop(self, *, unlist: bool = True) -> None:
        """`unlist=False`: the item's flag speaks of another record."""
        item = heapq.heappop(self._heap)[2]
        if unlist:
            item.listed = False

    def purge(self, alive: Callable[[Item], bool]) -> None:
        """Takes out the records of other items."""
        self._heap = [record for record in self._heap if alive(record[2])]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class Ranked(Eviction):
    """`rank(item)` must not fall while the item is held."""

    def __init__(self) -> None:
        self._ranks = Ranks()

    @abstractmethod
    def rank(self, item: Item) -> float:
        """Lower goes first."""

    def offer(self, item: Item) -> None:
        if item.evictable and not item.listed:
            self._ranks.push(item, self.rank(item))

    def victim(self) -> Item | None:
        while (top := self._ranks.top()) is not None:
            rank, item = top
            if item.evictable and self.rank(item) == rank:
                return item
            self._ranks.pop()
            self.offer(item)
        return None

    def split(self, head: Item, tail: Item) -> None:
        self.offer(tail)
