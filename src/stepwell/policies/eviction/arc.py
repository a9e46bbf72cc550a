"""ARC (Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003)."""

from __future__ import annotations

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.queue import Place, Queue
from stepwell.policies.eviction.ranked import Ranks
from stepwell.policies.item import Item


class _Part:
    """Items that are held, evictable ones of them by their last use (`ranks`, of which some are `stale`: of items that
    are in the other part by now), and a queue of those that left."""

    def __init__(self) -> None:
        self.size = 0
        self.ranks = Ranks()
        self.stale = 0
        self.ghosts = Queue()


class _Place(Place):
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
        self._once, self._often = _Part(), _Part()
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
            self._once.stale += item.listed
            item.listed = False
            place.part = self._often
            self._clean(self._once)

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
        item.note = _Place(item, part, held=True)
        item.listed = False
        part.size += item.size

    def offer(self, item: Item) -> None:
        if item.evictable and not item.listed:
            item.note.part.ranks.push(item, item.used)

    def victim(self) -> Item | None:
        if self._once.size > self._target:
            return self._oldest(self._once) or self._oldest(self._often)
        return self._oldest(self._often) or self._oldest(self._once)

    def _oldest(self, part: _Part) -> Item | None:
        while (top := part.ranks.top()) is not None:
            used, item = top
            here = self._is_of(item, part)
            if here and item.evictable and item.used == used:
                return item
            part.ranks.pop(unlist=here)
            if here:
                self.offer(item)
            else:
                part.stale -= 1
        return None

    @staticmethod
    def _is_of(item: Item, part: _Part) -> bool:
        return item.note is not None and item.note.held and item.note.part is part

    def _clean(self, part: _Part) -> None:
        if part.stale > 64 and 2 * part.stale > len(part.ranks):
            part.ranks.purge(lambda item: self._is_of(item, part))
            part.stale = 0

    def leave(self, item: Item) -> None:
        place = item.note
        place.held = False
        place.part.size -= item.size
        place.part.ghosts.append(place)
        held = self._held
        self._trim(self._once, max(0, held - self._once.size))
        self._trim(self._often, max(0, 2 * held - self._once.ghosts.size - held))

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
