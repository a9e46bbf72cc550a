"""Policies that give each item a rank that grows when it is used: the lowest goes."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator
from itertools import count

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.item import Item

MAX_VOID = 64
"""Void records that are kept before they are removed, unless they are more than half of all."""


class Ranks:
    """A heap with one record for each listed item; of equal ranks, what was used longest ago is first. An item that was
    used since moves back when its record comes to the top, so that a use costs nothing here.

    `listed` is the number of the item's record: one with another number is void. `numbers`: the same for all heaps that
    an item may move between."""

    __slots__ = ("_heap", "_numbers", "_void")

    def __init__(self, numbers: Iterator[int]) -> None:
        """`numbers` ascend from 1."""
        self._heap: list[tuple[float, float, int, Item]] = []
        self._numbers = numbers
        self._void = 0

    def push(self, item: Item, rank: float) -> None:
        item.listed = next(self._numbers)
        heapq.heappush(self._heap, (rank, item.used, item.listed, item))

    def top(self) -> tuple[float, Item] | None:
        heap = self._heap
        while heap:
            rank, _, number, item = heap[0]
            if item.listed == number:
                return rank, item
            heapq.heappop(heap)
            self._void -= 1
        return None

    def pop(self) -> None:
        """Removes the item that `top` returned."""
        heapq.heappop(self._heap)[3].listed = 0

    def few(self, n: int) -> list[Item]:
        """Up to `n` items near the top, the top included."""
        return [record[3] for record in self._heap[:n] if record[3].listed == record[2]]

    def remove(self, item: Item) -> None:
        """Removes the item if it is listed. Its record becomes void, and is dropped at the top or when there are many
        such."""
        if not item.listed:
            return
        item.listed = 0
        self._void += 1
        if self._void > MAX_VOID and 2 * self._void > len(self._heap):
            self._heap = [record for record in self._heap if record[3].listed == record[2]]
            heapq.heapify(self._heap)
            self._void = 0


class Ranked(Eviction):
    """`rank(item)` must not fall while the item is held."""

    def __init__(self) -> None:
        self._ranks = Ranks(count(1))

    @abstractmethod
    def rank(self, item: Item) -> float:
        """Rank of the item: the lowest leaves first."""

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

    def few(self, n: int) -> list[Item]:
        self.victim()
        return self._ranks.few(n)

    def leave(self, item: Item) -> None:
        self._ranks.remove(item)

    def split(self, head: Item, tail: Item) -> None:
        self.offer(tail)
