"""Least recently used, tails before heads: which block of an owner goes next.

A heap with lazy deletion: a record counts only while its entry is evictable and was not used since. Leaves alone are in
it (a parent enters when its last child has left), so a prefix is taken from its end and stays usable from its start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from stepwell.hierarchy.entry import Entry


class Recency:
    __slots__ = ("_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []
        self._sequence = 0

    def offer(self, entry: Entry) -> None:
        """Call whenever an entry may have become evictable, or was used while it is."""
        if entry.evictable:
            self._sequence += 1
            heapq.heappush(self._heap, (entry.used, self._sequence, entry))

    def oldest(self) -> Entry | None:
        """The next to go, or None. Leaves it in place."""
        heap = self._heap
        while heap:
            used, _, entry = heap[0]
            if entry.evictable and entry.used == used:
                return entry
            heapq.heappop(heap)
        return None

    def few(self, n: int) -> Iterator[Entry]:
        """Some of the oldest candidates, at most n, the oldest among them: the heap's top, so it costs n whatever is
        cached."""
        self.oldest()
        return (e for used, _, e in self._heap[:n] if e.evictable and e.used == used)

    def trim(self, live: int) -> None:
        """Bounds the heap: stale records are dropped when they outnumber the owner's `live` entries four to one."""
        if len(self._heap) > 4 * live + 64:
            fresh = {id(e): (used, n, e) for used, n, e in self._heap if e.evictable and e.used == used}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)
