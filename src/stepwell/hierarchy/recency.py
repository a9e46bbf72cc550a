"""Least recently used, tails before heads: which block of an owner goes next.

Leaves alone are listed (a parent enters when its last child has left), so a prefix is taken from its end and stays
usable from its start. A heap with one record per listed block: a block that was used since moves back when its record
comes to the top, so that using a block costs nothing here and the heap never outgrows the blocks.
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

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, entry: Entry) -> None:
        """Call whenever an entry may have become evictable."""
        if entry.evictable and not entry.listed:
            entry.listed = True
            self._push(entry)

    def _push(self, entry: Entry) -> None:
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
            if entry.evictable:
                self._push(entry)
            else:
                entry.listed = False
        return None

    def few(self, n: int) -> Iterator[Entry]:
        """Some of the oldest candidates, the oldest among them: the top of the heap, not sorted."""
        self.oldest()
        return (entry for _, _, entry in self._heap[:n] if entry.evictable)
