"""The least valuable of some: value is expected reuse times prefill seconds saved, for each second and byte held."""

from __future__ import annotations

import heapq
import random
from typing import Final

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.item import Item
from stepwell.policies.reuse import Reuse, class_of

DRAWN: Final = 64
"""Evictable items that are looked at for a victim, beside the KEPT least valuable ones of before (as Redis approximates
LRU). In long contexts there are few more: only the ends of prefixes are evictable."""

KEPT: Final = 8


class Valued(Eviction):
    """Which item's blocks are expected to save the fewest prefill seconds for each second that they are held: `reuse`
    learns how soon items of its class and age are used again, and the item knows what that saves.

    Values change as time passes, so there is no order to keep: some evictable items are drawn, and the worst goes. What
    stood before it and has the same history goes next, without another draw: it is worth about the same, or less."""

    def __init__(self, reuse: Reuse, seed: int = 0) -> None:
        self._reuse = reuse
        self._dice = random.Random(seed)
        self._evictable: list[Item] = []
        self._kept: list[Item] = []
        self._now = -1.0
        self._gone = (-1.0, 0.0, 0)  # when something left last, and that item's history
        self._next: Item | None = None

    def value(self, item: Item) -> float:
        """Expected prefill seconds saved per second and block."""
        row, seconds = item.note
        return self._reuse.rate(row, self._now - item.used) * seconds  # type: ignore[no-any-return]

    def refer(self, item: Item, now: float) -> None:
        if now != self._now:
            self._now = now
            self._reuse.tick(now)
        if item.uses:
            self._reuse.used_again(item.used, class_of(item.uses), item.size)
        row = class_of(item.uses + 1)
        self._reuse.used(now, row, item.size)
        item.note = row, item.seconds / item.size

    def offer(self, item: Item) -> None:
        if not item.evictable:
            return
        if not item.listed:
            self._evictable.append(item)
            item.listed = len(self._evictable)
        if self._gone == (self._now, item.used, item.uses):
            self._next = item

    def victim(self) -> Item | None:
        if self._next is not None and self._next.evictable and self._gone == self._history(self._next):
            return self._next
        value = self.value
        kept = [(value(item), item) for item in self._kept if item.evictable]
        drawn = [(value(item), item) for item in self._draw(DRAWN)]
        least = heapq.nsmallest(KEPT, [*kept, *drawn], key=_first)
        self._kept = list({id(item): item for _, item in least}.values())
        return self._kept[0] if self._kept else None

    def _history(self, item: Item) -> tuple[float, float, int]:
        return self._now, item.used, item.uses

    def _draw(self, n: int) -> list[Item]:
        """So many at random; one may come twice. What is not evictable any more is taken off the list when it is
        drawn."""
        drawn: list[Item] = []
        items, dice = self._evictable, self._dice.random
        while items and len(drawn) < n:
            item = items[int(dice() * len(items))]
            if item.evictable:
                drawn.append(item)
            else:
                self._unlist(item)
        return drawn

    def _unlist(self, item: Item) -> None:
        """`listed` is its place in the list, from 1."""
        last = self._evictable.pop()
        if last is not item:
            self._evictable[item.listed - 1] = last
            last.listed = item.listed
        item.listed = 0

    def leave(self, item: Item) -> None:
        if item.listed:
            self._unlist(item)
        self._gone, self._next = self._history(item), None

    def split(self, head: Item, tail: Item) -> None:
        for part in (head, tail):
            if part.note is not None:
                part.note = part.note[0], part.seconds / part.size
        self.offer(tail)

    def forget(self, item: Item) -> None:
        self._reuse.forgotten(item.used, class_of(item.uses), item.size)


def _first(pair: tuple[float, Item]) -> float:
    return pair[0]
