"""A queue of items in the order of their arrival, with places in its middle."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.policies.item import Item


class QueuePlace:
    """Place of an item. `queue`: None while it is in none."""

    __slots__ = ("item", "newer", "older", "queue")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.queue: Queue | None = None
        self.older: QueuePlace | None = None
        self.newer: QueuePlace | None = None


class Queue:
    """A doubly linked list, so that every step is O(1). `size`: blocks of its items."""

    __slots__ = ("newest", "oldest", "size")

    def __init__(self) -> None:
        self.oldest: QueuePlace | None = None
        self.newest: QueuePlace | None = None
        self.size = 0

    def upwards(self, place: QueuePlace | None) -> Iterator[Item]:
        """Items from this place to the newest."""
        while place is not None:
            yield place.item
            place = place.newer

    def append(self, place: QueuePlace) -> None:
        """Adds the item as the newest."""
        self._insert(self.newest, place, None)

    def prepend(self, place: QueuePlace) -> None:
        """Adds the item as the oldest."""
        self._insert(None, place, self.oldest)

    def split(self, place: QueuePlace, tail: QueuePlace) -> None:
        """`tail` gets the place right before `place`, of whose blocks it took some."""
        self._insert(place.older, tail, place)
        self.size -= tail.item.size

    def remove(self, place: QueuePlace) -> None:
        assert place.queue is self
        older, newer = place.older, place.newer
        if older is None:
            self.oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self.newest = older
        else:
            newer.older = older
        self.size -= place.item.size
        place.queue = place.older = place.newer = None

    def _insert(self, older: QueuePlace | None, place: QueuePlace, newer: QueuePlace | None) -> None:
        place.queue, place.older, place.newer = self, older, newer
        if older is None:
            self.oldest = place
        else:
            older.newer = place
        if newer is None:
            self.newest = place
        else:
            newer.older = place
        self.size += place.item.size
