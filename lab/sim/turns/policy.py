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

from heapq import heapify, heappop, heappush

_Line = list[tuple[float, int]]
"""Requests by their ends, a heap. Entries of ends that have changed stay in it for a while."""

_FEW = 64
"""Entries of heaps that are not worth clearing out."""


class Turns:
    """Requests are numbers. Those below 0 go before all others, the smallest first; who waits meanwhile may end later.
    Equal ones go by their numbers."""

    def __init__(self) -> None:
        self._now = 0.0  # bytes that a request would have by now that has shared the device from the beginning
        self._ends: dict[int, float] = {}  # the moment at which each would have all, on the scale of `_now`
        self._unserved: dict[int, int] = {}  # bytes of those that wait
        self._sharing: set[int] = set()  # requests whose end has not come
        self._to_end: _Line = []
        self._to_serve: _Line = []

    def __contains__(self, request: int) -> bool:
        """The request waits."""
        return request in self._unserved

    def wants(self, request: int, nbytes: int) -> None:
        """The request waits for so many bytes, in addition to what it waits for already."""
        end = max(self._now, self._ends.get(request, 0.0))
        self._sharing.add(request)
        self._unserved[request] = self._unserved.get(request, 0) + nbytes
        self._move(request, end + nbytes)

    def spares(self, request: int, nbytes: int) -> None:
        """The request does not want so many of its bytes any more."""
        if request in self._sharing:
            self._move(request, self._ends[request] - nbytes)
            if self._ends[request] - self._now < 0.5:  # none, but for rounding
                self._ends[request] = self._now
                self._sharing.remove(request)
        self._less(request, nbytes)

    def served(self, request: int, nbytes: int) -> None:
        """The request gets so many of its bytes."""
        self._less(request, nbytes)
        left = float(nbytes)
        while self._to_end and left > 0:
            end, first = self._to_end[0]
            if first not in self._sharing or end != self._ends[first]:  # an entry that was replaced
                heappop(self._to_end)
            elif (end - self._now) * len(self._sharing) > left:
                self._now += left / len(self._sharing)
                return
            else:
                left -= (end - self._now) * len(self._sharing)
                self._now = end
                self._sharing.remove(first)
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
        if len(self._to_end) + len(self._to_serve) > _FEW + 8 * len(self._ends):
            self._to_end = [(self._ends[one], one) for one in self._sharing]
            self._to_serve = [(self.place(one), one) for one in self._unserved]
            heapify(self._to_end)
            heapify(self._to_serve)

    def _less(self, request: int, nbytes: int) -> None:
        self._unserved[request] -= nbytes
        if not self._unserved[request]:
            del self._unserved[request]
            self._forget(request)
        if not self._unserved:
            self._now = 0.0
            for kept in (self._ends, self._sharing, self._to_end, self._to_serve):
                kept.clear()

    def _forget(self, request: int) -> None:
        """One that has all, and would have it if the device were shared, matters no more."""
        if request not in self._unserved and request not in self._sharing:
            del self._ends[request]
