"""Which of several requests the tiers are read for next: the one that would be the first to have all of its bytes if
they shared the tiers equally.

It is read for alone. So none ends later than under equal sharing: one that shares the tiers with at most n - 1 others
at a time waits at most n times as long as it would alone, however many come. Short ones go first, nearly as with the
shortest remaining time; equal ones that come together are served one after the other, which no order beats on average.
Friedman and Henderson, "Fairness and efficiency in web server protocols", SIGMETRICS 2003.

Time is counted in bytes, so that the speed of a tier need not be known.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

Place = tuple[float, int]
"""A place in line: the smallest is served first. Places are unique."""

_FEW = 64
"""Records that are not worth clearing out."""


@dataclass(slots=True, eq=False)
class RequestTurn:
    """One request's. `number`: how many came before it. `hurries`: it goes before all that do not, the smallest first.
    `end`: the moment at which it would have all that it wants, on the scale of `Turns`. `unserved`: bytes that it waits
    for."""

    number: int
    end: float
    hurries: int = 0
    unserved: int = 0

    @property
    def place(self) -> Place:
        """Where it stands in line."""
        return (self.hurries - 1.0, self.number) if self.hurries < 0 else (self.end, self.number)


UNAWAITED = RequestTurn(0, inf)
"""The turn of a block that no request waits for."""


class Turns:
    """The requests of one well, whichever engine they are of."""

    def __init__(self) -> None:
        self._now = 0.0  # bytes that a request would have by now that has shared the tiers from the beginning
        self._came = 0
        self.unserved = 0  # bytes that all of them wait for
        self._sharing: set[RequestTurn] = set()  # those whose end has not come
        self._to_end: list[tuple[float, int, RequestTurn]] = []  # a heap; records of ends that have moved stay a while

    def join(self, order: int) -> RequestTurn:
        """The turn of a request that comes, and wants nothing yet. `order`: its place in the engine's queue; those with
        one below 0 were preempted, and hurry."""
        self._came += 1
        return RequestTurn(self._came, self._now, min(order, 0))

    def place(self, turn: RequestTurn, nbytes: int) -> Place:
        """Where it would stand in line if it waited for so many bytes."""
        return RequestTurn(turn.number, self._end(turn, nbytes), turn.hurries).place

    def wants(self, turn: RequestTurn, nbytes: int) -> None:
        """The request waits for so many bytes from now on, whatever it has waited for. Blocks that are in line for it
        already stay where they are."""
        end, self.unserved = self._end(turn, nbytes), self.unserved + nbytes - turn.unserved
        turn.unserved = nbytes
        if end != turn.end:
            turn.end = end
            if end > self._now:
                self._sharing.add(turn)
                heappush(self._to_end, (end, turn.number, turn))
            else:
                self._sharing.discard(turn)
        self._tidy()

    def _end(self, turn: RequestTurn, nbytes: int) -> float:
        more = nbytes - turn.unserved
        if more > 0:
            return max(self._now, turn.end) + more
        return max(self._now, turn.end + more) if turn.end > self._now else turn.end

    def served(self, turn: RequestTurn, nbytes: int) -> None:
        """So many bytes are read in this turn."""
        left = float(min(nbytes, turn.unserved))
        turn.unserved -= int(left)
        self.unserved -= int(left)
        while self._to_end and left > 0:
            end, _, first = self._to_end[0]
            if first not in self._sharing or end != first.end:
                heappop(self._to_end)
            elif (end - self._now) * len(self._sharing) > left:
                self._now += left / len(self._sharing)
                break
            else:
                left -= (end - self._now) * len(self._sharing)
                self._now = end
                self._sharing.remove(first)
        self._tidy()

    def _tidy(self) -> None:
        if not self.unserved:  # then all would have all, but for rounding
            self._now = max((self._now, *(turn.end for turn in self._sharing)))
            self._sharing.clear()
            self._to_end.clear()
        elif len(self._to_end) > _FEW + 4 * len(self._sharing):
            self._to_end = [(turn.end, turn.number, turn) for turn in self._sharing]
            heapify(self._to_end)
