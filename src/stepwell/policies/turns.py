"""Which of several requests is served next by a device that they share: the one that equal sharing would end first.

Each request has a moment at which it would have all of its bytes if the device were shared equally by those that wait.
The request whose moment is the earliest is served alone. So none ends later than under equal sharing: one that shares
the device with at most n - 1 others at a time waits at most n times as long as it would alone, however many come. Short
ones go first, nearly as with the shortest remaining time; equal ones that come together are served one after the
other, which no order beats on average. Friedman and Henderson, "Fairness and efficiency in web server protocols",
SIGMETRICS 2003.

Time is counted in bytes, so that the device's speed need not be known.
"""

from __future__ import annotations

from heapq import heappop, heappush

_Line = list[tuple[float, int]]
"""Requests by their ends, a heap. One whose end has changed is in it more than once."""


class Turns:
    """Requests are numbers. Those below 0 go before all others, the smallest first; who waits meanwhile may end later.
    Equal ones go by their numbers."""

    def __init__(self) -> None:
        self._now = 0.0  # bytes that a request would have by now that has shared the device from the beginning
        self._ends: dict[int, float] = {}  # the moment at which each would have all, on the scale of `_now`
        self._unserved: dict[int, int] = {}  # bytes of those that wait
        self._sharing = 0  # requests whose end has not come
        self._to_end: _Line = []
        self._to_serve: _Line = []

    def __contains__(self, request: int) -> bool:
        """The request waits."""
        return request in self._unserved

    def wants(self, request: int, nbytes: int) -> None:
        """The request waits for so many bytes, in addition to what it waits for already."""
        end = self._ends.get(request, 0.0)
        if end <= self._now:
            end = self._now
            self._sharing += 1
        self._unserved[request] = self._unserved.get(request, 0) + nbytes
        self._move(request, end + nbytes)

    def spares(self, request: int, nbytes: int) -> None:
        """The request does not want so many of its bytes any more."""
        end = self._ends[request]
        if end > self._now:
            self._sharing -= end - nbytes <= self._now
            self._move(request, max(self._now, end - nbytes))
        self._less(request, nbytes)

    def served(self, request: int, nbytes: int) -> None:
        """The request gets so many of its bytes."""
        self._less(request, nbytes)
        left = float(nbytes)
        while self._to_end and left > 0:
            end, first = self._to_end[0]
            if end != self._ends.get(first) or end <= self._now:  # an entry that was replaced
                heappop(self._to_end)
            elif (end - self._now) * self._sharing > left:
                self._now += left / self._sharing
                return
            else:
                left -= (end - self._now) * self._sharing
                self._now = end
                self._sharing -= 1
                self._forget(first)

    def next(self) -> int | None:
        """The request to be served; None: none waits."""
        while self._to_serve:
            place, request = self._to_serve[0]
            if request in self._unserved and place == self.place(request):
                return request
            heappop(self._to_serve)
        return None

    def place(self, request: int) -> float:
        """Place in line of a request that waits: the smallest is served next. It grows when the request wants more."""
        return self._ends[request] if request >= 0 else request

    def _move(self, request: int, end: float) -> None:
        self._ends[request] = end
        heappush(self._to_end, (end, request))
        heappush(self._to_serve, (self.place(request), request))

    def _less(self, request: int, nbytes: int) -> None:
        self._unserved[request] -= nbytes
        if not self._unserved[request]:
            del self._unserved[request]
            self._forget(request)
        if not self._unserved:
            self._ends.clear()
            self._to_end.clear()
            self._to_serve.clear()
            self._now, self._sharing = 0.0, 0

    def _forget(self, request: int) -> None:
        """One that has all, and would have it if the device were shared, matters no more."""
        if request not in self._unserved and self._ends[request] <= self._now:
            del self._ends[request]
