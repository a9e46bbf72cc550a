"""SIEVE (Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU", NSDI 2024)."""

from __future__ import annotations

from itertools import islice

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.queue import Place, Queue
from stepwell.policies.item import Item


class _Place(Place):
    __slots__ = ("visited",)

    def __init__(self, item: Item, visited: bool = False) -> None:
        super().__init__(item)
        self.visited = visited


class Sieve(Eviction):
    """A hand moves from the oldest to the newest: what was used since it came by stays where it is, the next other one
    goes. Heads of a prefix are passed over while their tails are held."""

    def __init__(self) -> None:
        self._queue = Queue()
        self._hand: Place | None = None

    def refer(self, item: Item, now: float) -> None:
        if item.note is not None:
            item.note.visited = True

    def enter(self, item: Item) -> None:
        item.note = _Place(item)
        self._queue.append(item.note)

    def offer(self, item: Item) -> None:
        pass  # the hand comes by

    def victim(self) -> Item | None:
        for start in (self._hand, self._queue.oldest, self._queue.oldest):
            place: Place | None = start
            while place is not None:
                assert isinstance(place, _Place)
                if place.item.evictable and not place.visited:
                    self._hand = place
                    return place.item
                place.visited = False
                place = place.newer
        return None

    def few(self, n: int) -> list[Item]:
        victim = self.victim()
        return [] if victim is None else list(islice(self._queue.upwards(victim.note), n))

    def leave(self, item: Item) -> None:
        place: _Place = item.note
        if self._hand is place:
            self._hand = place.newer
        self._queue.remove(place)
        item.note = None

    def split(self, head: Item, tail: Item) -> None:
        if head.note is not None:
            tail.note = _Place(tail, head.note.visited)
            self._queue.split(head.note, tail.note)
            if self._hand is head.note:
                self._hand = tail.note
