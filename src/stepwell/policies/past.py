"""Items that left a tier, or were refused, and are remembered for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from stepwell.policies.item import Item

Held = TypeVar("Held", bound=Item)

REMEMBERED: Final = 4
MIN_REMEMBERED: Final = 1 << 16


def most_remembered(capacity: int) -> int:
    """Blocks that are remembered beside a tier of so many: four times as many, and at least 65,536 (some 10 MB), since
    a small tier has to remember for longer to see anything come back."""
    return max(REMEMBERED * capacity, MIN_REMEMBERED)


class PastTally:
    """Blocks that several pasts remember together."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks = 0


class Past(Generic[Held]):
    """At most `most` blocks of items that are not held, the earliest forgotten first; each is counted once, here and in
    `tally`. `forget(item)` has to set its `uses` to 0: what is forgotten already, or was never used, is nothing to
    remember."""

    def __init__(self, most: int, forget: Callable[[Held], None], tally: PastTally | None = None) -> None:
        self._most = most
        self._forget = forget
        self._tally = tally or PastTally()
        self._records: OrderedDict[Held, tuple[float, int]] = OrderedDict()
        self._blocks = 0

    def __iter__(self) -> Iterator[Held]:
        """The earliest first."""
        return iter(self._records)

    def remember(self, item: Held) -> None:
        """The item left, or was asked for and not let in."""
        self.came(item)
        if not item.uses:
            return
        self._records[item] = item.used, item.size
        self._count(item.size)
        self._shrink(self._most)

    @property
    def blocks(self) -> int:
        return self._blocks

    def forget(self, blocks: int) -> None:
        """Forgets the earliest items, up to this number of blocks."""
        self._shrink(max(0, self._blocks - blocks))

    def _shrink(self, most: int) -> None:
        while self._blocks > most:
            oldest, (used, size) = self._records.popitem(last=False)
            self._count(-size)
            if oldest.used == used:  # else it was asked for again just now, and will be remembered anew
                self._forget(oldest)

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        self._tally.blocks += blocks

    def came(self, item: Held) -> None:
        """The item is held from now on."""
        if item in self._records:
            self._count(-self._records.pop(item)[1])

    def wrong(self, gone: Iterable[Held]) -> str:
        """Describes an inconsistency if `gone` are all items that are not held and have a use; "" if there is none. For
        tests."""
        sizes = [size for _, size in self._records.values()]
        if sum(sizes) != self._blocks or sizes != [item.size for item in self._records] or self._blocks > self._most:
            return f"{self._blocks} blocks remembered, {sum(sizes)} recorded"
        missing = sum(item not in self._records for item in gone)
        return f"{missing} items that left are neither remembered nor forgotten" if missing else ""
