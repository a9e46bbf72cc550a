"""SIEVE (Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU", NSDI 2024)."""

from __future__ import annotations

from itertools import count

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.orders.ranked import Ranks
from stepwell.policies.item import Item


class _Place:
    """Record of a held item. `number` ascends with the time of its entry; `side`: its list, while it is listed."""

    __slots__ = ("number", "side", "visited")

    def __init__(self, number: int, visited: bool, side: Ranks) -> None:
        self.number = number
        self.visited = visited
        self.side = side


class Sieve(Eviction):
    """A hand moves from the oldest to the newest: what was used since it came by stays where it is, the next other one
    goes. Heads of a prefix are passed over while their tails are held.

    Only what may go is listed, by its number: before the hand, or behind it where it comes by only in its next round.
    So what cannot go costs nothing, however much that is; and the hand turns where nothing before it may go."""

    def __init__(self) -> None:
        records = count(1)
        self._before, self._behind = Ranks(records), Ranks(records)
        self._hand = 0  # the number that it stands at
        self._came = count(1)

    def refer(self, item: Item, now: float) -> None:
        if item.note is not None:
            item.note.visited = True

    def enter(self, item: Item) -> None:
        item.note = _Place(next(self._came), False, self._before)

    def offer(self, item: Item) -> None:
        if item.evictable and not item.listed:
            place: _Place = item.note
            self._put(item, self._before if place.number >= self._hand else self._behind)

    def _put(self, item: Item, side: Ranks) -> None:
        item.note.side = side
        side.push(item, item.note.number)

    def victim(self) -> Item | None:
        for _ in range(3):  # to the newest; once round, where it clears what was visited; and round again
            while (item := self._next()) is not None:
                if not item.note.visited:
                    self._hand = item.note.number
                    return item
                self._before.pop()
                item.note.visited = False
                self._put(item, self._behind)
            self._turn()
        return None

    def _next(self) -> Item | None:
        """The first evictable item before the hand."""
        while (top := self._before.top()) is not None and not top[1].evictable:
            self._before.pop()
        return None if top is None else top[1]

    def _turn(self) -> None:
        """Moves the hand from the newest back to the oldest."""
        self._before, self._behind = self._behind, self._before
        self._hand = 0

    def few(self, n: int) -> list[Item]:
        self.victim()
        return self._before.few(n)

    def leave(self, item: Item) -> None:
        place, item.note = item.note, None
        place.side.remove(item)
        if place.number >= self._hand and self._next() is None:
            self._turn()  # at once: what comes next is the newest, and not next to go

    def split(self, head: Item, tail: Item) -> None:
        if head.note is not None:
            tail.note = _Place(head.note.number, head.note.visited, head.note.side)
            self.offer(tail)
