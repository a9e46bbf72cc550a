"""The one clock of a simulated fleet: what is to happen, in the order of its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventClock:
    """Seconds from the start of the trace. What is due at the same time happens in the order in which it was asked
    for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Calls `do()` at `time`, or now if that has passed."""
        self._asked += 1
        heapq.heappush(self._events, (max(time, self.now), self._asked, do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def run(self) -> None:
        """Runs until no event is left."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()
