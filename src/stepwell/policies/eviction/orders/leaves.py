"""The ends of prefixes that may be evicted, in arrays, so that all of them can be valued at once."""

from __future__ import annotations

from typing import Final

import numpy as np

from stepwell.policies.item import Item
from stepwell.policies.reuse import Rates, bins

MOST: Final = 4096
"""Items that are looked at for one request: some 0.1 ms. Of more, others the next time."""


class Leaves:
    """An unordered list. `listed` of an item is its place here, from 1."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._used = np.zeros(64)
        self._worth = np.zeros(64)
        self._rows = np.zeros(64, np.intp)
        self._from = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, row: int, used: float) -> None:
        """`used`: when it was used last; `row`: the class of its reuse."""
        at = len(self._items)
        if at == len(self._used):
            self._used, self._worth = np.resize(self._used, 2 * at), np.resize(self._worth, 2 * at)
            self._rows = np.resize(self._rows, 2 * at)
        self._items.append(item)
        item.listed = at + 1
        self.renew(item, row, used)

    def renew(self, item: Item, row: int, used: float) -> None:
        """Updates the record of an item that is here."""
        at = item.listed - 1
        self._used[at], self._worth[at], self._rows[at] = used, item.seconds / item.size, row

    def take(self, item: Item) -> None:
        """Takes it off the list, on which it is."""
        at, item.listed = item.listed - 1, 0
        last = self._items.pop()
        if last is not item:
            end = len(self._items)
            self._items[at] = last
            last.listed = at + 1
            for array in (self._used, self._worth, self._rows):
                array[at] = array[end]

    def look(self, rates: Rates, now: float, most: int) -> list[tuple[float, Item]]:
        """The `most` least valuable ones with their values, the most valuable of these first."""
        n = len(self._items)
        first = self._from if n > MOST and self._from < n else 0
        last = min(n, first + MOST)
        self._from = last
        rows, ages = self._rows[first:last], now - self._used[first:last]
        values = rates[rows, bins(ages)] * self._worth[first:last]
        least = np.argpartition(values, most)[:most] if len(values) > most else np.arange(len(values))
        least = least[np.argsort(-values[least], kind="stable")]
        return [(float(values[at]), self._items[first + at]) for at in least.tolist()]
