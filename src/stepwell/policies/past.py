"""What left a tier, or was not let in, and is remembered for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from stepwell.policies.item import Item

Held = TypeVar("Held", bound=Item)

REMEMBERED: Final = 4
LEAST: Final = 1 << 16


def most_remembered(capacity: int) -> int:
    """Blocks that are remembered beside a tier of so many: four times as many, and at least 65,536 (some 10 MB), since
    a small tier has to remember for longer to see anything come back."""
    return max(REMEMBERED * capacity, LEAST)


class Past(Generic[Held]):
    """At most `most` blocks of items that are not held, the earliest forgotten first; each is counted once.
    `forget(item)` has to set its `uses` to 0."""

    def __init__(self, most: int, forget: Callable[[Held], None]) -> None:
        self._most = most
        self._forget = forget
        self._records: OrderedDict[Held, tuple[float, int]] = OrderedDict()
        self._blocks = 0

    def remember(self, item: Held) -> None:
        """It left, or was asked for and not let in."""
        self.came(item)
        self._records[item] = item.used, item.size
        self._blocks += item.size
        while self._blocks > self._most:
            oldest, (used, size) = self._records.popitem(last=False)
            self._blocks -= size
            if oldest.used == used:  # else it was asked for again just now, and will be remembered anew
                self._forget(oldest)

    def came(self, item: Held) -> None:
        """It is held from now on."""
        _, size = self._records.pop(item, (0.0, 0))
        self._blocks -= size

    def parted(self, head: Held, tail: Held) -> None:
        """`tail` was the end of `head` until now, and is not held."""
        if record := self._records.get(head):
            self._records[head] = record[0], head.size
            self._blocks -= tail.size
        self.remember(tail)
