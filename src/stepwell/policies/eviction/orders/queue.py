"""A queue of items in the order of their arrival, with places in its middle."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.policies.item import Item


class Place:
    """Where an item stands. `queue` is None when it stands nowhere."""

    __slots__ = ("item", "newer", "older", "queue")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.queue: Queue | None = None
        self.older: Place | None = None
        self.newer: Place | None = None


class Queue:
    """Doubly linked, so that every step is O(1). `size`: blocks of its items."""

    __slots__ = ("newest", "oldest", "size")

    def __init__(self) -> None:
        self.oldest: Place | None = None
        self.newest: Place | None = None
        self.size = 0

    def upwards(self, place: Place | None) -> Iterator[Item]:
        """From this place to the newest."""
        while place is not None:
            yield place.item
            place = place.newer

    def append(self, place: Place) -> None:
        """Adds the item as the newest."""
        self._insert(self.newest, place, None)

    def prepend(self, place: Place) -> None:
        """Adds the item as the oldest."""
        self._insert(None, place, self.oldest)

    def split(self, place: Place, tail: Place) -> None:
        """`tail` gets the place right before `place`, of whose blocks it took some."""
        self._insert(place.older, tail, place)
        self.size -= tail.item.size

    def remove(self, place: Place) -> None:
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

    def _insert(self, older: Place | None, place: Place, newer: Place | None) -> None:
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
