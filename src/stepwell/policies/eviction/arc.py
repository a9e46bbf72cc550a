"""ARC (Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.orders.queue import Queue, QueuePlace
from stepwell.policies.eviction.orders.ranked import Ranks
from stepwell.policies.item import Item


class _Part:
    """Items that are held, evictable ones of them by their last use (`ranks`), and a queue of those that left."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.size = 0
        self.ranks = Ranks(numbers)
        self.ghosts = Queue()


class _Place(QueuePlace):
    __slots__ = ("held", "part")

    def __init__(self, item: Item, part: _Part, held: bool) -> None:
        super().__init__(item)
        self.part = part
        self.held = held


class Arc(Eviction):
    """Two LRU lists: `once` for what was used once since it came, `often` for the rest. Each remembers what it evicted;
    a request for that tells that the list is too short, and moves the target between them. What is remembered of an
    item is no more than the lists: as many blocks as are held."""

    def __init__(self) -> None:
        numbers = count(1)
        self._once, self._often = _Part(numbers), _Part(numbers)
        self._target = 0.0  # blocks in `once`

    @property
    def _held(self) -> int:
        return self._once.size + self._often.size

    def refer(self, item: Item, now: float) -> None:
        place = item.note
        if place is None:
            return
        if not place.held:
            if place.queue is not None:  # or it was asked for before, and not let in then
                self._learn(item, place)
        elif place.part is self._once:
            self._once.size -= item.size
            self._often.size += item.size
            self._once.ranks.remove(item)
            place.part = self._often
            self.offer(item)

    def _learn(self, item: Item, place: _Place) -> None:
        once, often = self._once.ghosts.size, self._often.ghosts.size
        if place.part is self._once:
            step = max(1.0, often / once)
            self._target = min(self._held, self._target + step * item.size)
        else:
            step = max(1.0, once / often)
            self._target = max(0.0, self._target - step * item.size)
        place.part.ghosts.remove(place)
        place.part = self._often

    def enter(self, item: Item) -> None:
        part = self._once if item.note is None else self._often
        if item.note is not None and item.note.queue is not None:
            item.note.queue.remove(item.note)  # it was not asked for since it left
        item.note = _Place(item, part, held=True)
        part.size += item.size
        self._trim(self._once, max(0, self._held - self._once.size))
        self._trim(self._often, max(0, self._held - self._once.ghosts.size))

    def offer(self, item: Item) -> None:
        if item.evictable and not item.listed:
            item.note.part.ranks.push(item, item.used)

    def victim(self) -> Item | None:
        if self._once.size > self._target:
            return self._oldest(self._once) or self._oldest(self._often)
        return self._oldest(self._often) or self._oldest(self._once)

    def few(self, n: int) -> list[Item]:
        self.victim()
        parts = (self._once, self._often) if self._once.size > self._target else (self._often, self._once)
        return [item for part in parts for item in part.ranks.few(n)][:n]

    def _oldest(self, part: _Part) -> Item | None:
        while (top := part.ranks.top()) is not None:
            used, item = top
            if item.evictable and item.used == used:
                return item
            part.ranks.pop()
            self.offer(item)
        return None

    def leave(self, item: Item) -> None:
        place = item.note
        place.held = False
        place.part.size -= item.size
        place.part.ranks.remove(item)
        place.part.ghosts.append(place)

    def _trim(self, part: _Part, size: int) -> None:
        while part.ghosts.size > size and (oldest := part.ghosts.oldest) is not None:
            self.forget(oldest.item)

    def split(self, head: Item, tail: Item) -> None:
        place = head.note
        if place is None:
            return
        tail.note = _Place(tail, place.part, place.held)
        if place.held:
            self.offer(tail)
        elif place.queue is not None:
            place.queue.split(place, tail.note)

    def forget(self, item: Item) -> None:
        place = item.note
        if place is not None and place.queue is not None:
            place.queue.remove(place)
        item.note = None
