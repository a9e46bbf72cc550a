"""S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023), tail first."""

from __future__ import annotations

from itertools import islice
from typing import Final

from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.orders.queue import Queue, QueuePlace
from stepwell.policies.item import Item

SMALL: Final = 0.1
"""Share of the small queue."""

MOST: Final = 3
"""Uses are counted up to this."""


class _Place(QueuePlace):
    __slots__ = ("home", "uses")

    def __init__(self, item: Item, home: Queue, uses: int = 0) -> None:
        super().__init__(item)
        self.home = home
        self.uses = uses


class S3Fifo(Eviction):
    """New items pass through a small queue; those used twice meanwhile move on to the main one, the others leave but
    are remembered, as many as the main queue may hold: they come back straight into it. In the main queue each use is
    worth one more round.

    What comes to the end of its queue while a tail of it is held, is due: it waits aside, and is the next to be looked
    at when the tail has gone."""

    def __init__(self) -> None:
        self._small, self._main, self._ghosts = Queue(), Queue(), Queue()
        self._due = Queue()

    def refer(self, item: Item, now: float) -> None:
        if item.note is not None:
            item.note.uses = min(MOST, item.note.uses + 1)

    def enter(self, item: Item) -> None:
        remembered = item.note is not None
        if remembered:
            self._ghosts.remove(item.note)
        home = self._main if remembered else self._small
        item.note = _Place(item, home)
        home.append(item.note)
        while self._ghosts.size > (1 - SMALL) * self._held and (oldest := self._ghosts.oldest) is not None:
            self.forget(oldest.item)

    def offer(self, item: Item) -> None:
        place = item.note
        if item.evictable and place.queue is self._due:
            self._due.remove(place)
            place.home.prepend(place)

    def victim(self) -> Item | None:
        if self._small.size > SMALL * self._held:
            return self._of_small() or self._of_main()
        return self._of_main() or self._of_small() or self._of_main()  # where some of the small ones may be by now

    def few(self, n: int) -> list[Item]:
        victim = self.victim()
        if victim is None:
            return []
        queue = victim.note.queue
        return list(islice(queue.upwards(queue.oldest), n))

    @property
    def _held(self) -> int:
        return self._small.size + self._main.size + self._due.size

    def _of_small(self) -> Item | None:
        while (place := self._small.oldest) is not None:
            assert isinstance(place, _Place)
            if place.uses > 1:
                self._small.remove(place)
                place.uses, place.home = 0, self._main
                self._main.append(place)
            elif place.item.evictable:
                return place.item
            else:
                self._put_aside(place)
        return None

    def _of_main(self) -> Item | None:
        while (place := self._main.oldest) is not None:
            assert isinstance(place, _Place)
            if place.uses:
                self._main.remove(place)
                place.uses -= 1
                self._main.append(place)
            elif place.item.evictable:
                return place.item
            else:
                self._put_aside(place)
        return None

    def _put_aside(self, place: _Place) -> None:
        place.home.remove(place)
        self._due.append(place)

    def leave(self, item: Item) -> None:
        place = item.note
        place.queue.remove(place)
        if place.home is self._main:
            item.note = None
        else:
            self._ghosts.append(place)

    def split(self, head: Item, tail: Item) -> None:
        place = head.note
        if place is not None:
            tail.note = _Place(tail, place.home, place.uses)
            place.queue.split(place, tail.note)

    def forget(self, item: Item) -> None:
        if item.note is not None:
            self._ghosts.remove(item.note)
            item.note = None
