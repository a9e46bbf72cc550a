"""What left a tier, or was not let in, and is remembered for a while."""

from __future__ import annotations

from collections import deque
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
    """At most `most` blocks, the earliest forgotten first. `held(item)`: it came back, so its record here is void, as
    it is when the item was used since. `forget(item)` has to set its `uses` to 0."""

    def __init__(self, most: int, held: Callable[[Held], bool], forget: Callable[[Held], None]) -> None:
        self._most = most
        self._held = held
        self._forget = forget
        self._records: deque[tuple[Held, float, int]] = deque()
        self._blocks = 0

    def remember(self, item: Held) -> None:
        self._records.append((item, item.used, item.size))
        self._blocks += item.size
        while self._blocks > self._most:
            oldest, used, blocks = self._records.popleft()
            self._blocks -= blocks
            if oldest.uses and oldest.used == used and not self._held(oldest):
                self._forget(oldest)
