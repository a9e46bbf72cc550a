"""The least valuable: value is expected reuse times prefill seconds saved, for each second that a block is held."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.orders.leaves import Leaves
from stepwell.policies.item import Item
from stepwell.policies.pace import Pace
from stepwell.policies.reuse import Reuse, class_of

CANDIDATES: Final = 64
"""Least valuable items that are found at a time."""

_USES_AND_NOTE, _SIZE = attrgetter("uses", "note"), attrgetter("size")


class Valued(Eviction):
    """Evicts the item whose blocks are expected to save the fewest prefill seconds for each second that they are held:
    `reuse` learns how soon items of its class and age are used again, and the item knows what that saves.

    Values change as time passes, so there is no order to keep. For each request that needs room all evictable items are
    valued (of very many, a part each time), and the worst go, one after the other.

    An item's note: the class of its reuse, and when, in the time of `Pace`, it was used last. Those that were used
    together have one note, so that they are counted together the next time."""

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse
        self._leaves = Leaves()
        self._pace = Pace()
        self._worst: list[tuple[float, int, Item]] = []  # descending, so that the last goes first
        self._sequence = 0

    def value(self, item: Item) -> float:
        """Expected prefill seconds saved per second and block."""
        row, used = item.note
        return self._reuse.rate(row, self._pace.time - used) * (item.seconds / item.size)

    def refer(self, item: Item, now: float) -> None:
        self.refer_all((item,), now)

    def refer_all(self, items: Sequence[Item], now: float) -> None:
        if self._pace.advance(now):
            self._reuse.tick(self._pace.time)
            self._worst.clear()
        for (uses, before), alike in groupby(items, _USES_AND_NOTE):
            some = list(alike)
            blocks = sum(map(_SIZE, some))
            if uses:
                self._reuse.used_again(before[1], before[0], blocks)
            note = row, time = class_of(uses + 1), self._pace.time
            self._reuse.used(time, row, blocks)
            for item in some:
                item.note = note
                if item.listed:
                    self._leaves.renew(item, row, time)

    def offer(self, item: Item) -> None:
        if item.evictable and not item.listed:
            self._leaves.put(item, *item.note)
            if self._worst:
                self._sequence += 1
                insort(self._worst, (-self.value(item), self._sequence, item))

    def victim(self) -> Item | None:
        while self._worst or self._look():
            item = self._worst[-1][2]
            if item.listed and item.evictable:
                return item
            self._worst.pop()
            self._unlist(item)
        return None

    def few(self, n: int) -> list[Item]:
        self.victim()
        return [item for _, _, item in self._worst[: -n - 1 : -1]]

    def _unlist(self, item: Item) -> None:
        if item.listed:
            self._leaves.take(item)

    def _look(self) -> bool:
        """Finds the least valuable ones. False: nothing is listed."""
        found = self._leaves.look(self._reuse.rates, self._pace.time, CANDIDATES)
        self._worst = [(-value, number, item) for number, (value, item) in enumerate(found)]
        self._sequence = len(found)
        return bool(found)

    def leave(self, item: Item) -> None:
        self._unlist(item)

    def split(self, head: Item, tail: Item) -> None:
        self._unlist(head)
        for part in (head, tail):
            if part.note is not None:
                self.offer(part)

    def forget(self, item: Item) -> None:
        self._reuse.forgotten(item.note[1], item.note[0], item.size)
