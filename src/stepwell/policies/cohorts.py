"""Number of blocks alive by age, without a record for each block."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import Final

FINENESS: Final = 8
"""Neighbours are joined when the times between their uses are at most this part of their age."""


class _Cohort:
    __slots__ = ("alive", "bin", "end", "joined", "start")

    def __init__(self, start: float, classes: int) -> None:
        self.start = self.end = start  # uses at these times and between
        self.bin = 0
        self.joined = False  # into an older one
        self.alive = [0] * classes


class Cohorts:
    """Blocks by the time of their last use, in groups that grow coarser with age: their number grows with the logarithm
    of time, and the work for each request is constant on average.

    `edges`: the ages in seconds at which bins begin, ascending, but the first, which begins at 0. `risk[class][bin]`
    grows by the blocks that are alive when they come of that age; it is the caller's."""

    def __init__(self, edges: list[float], risk: list[list[int]]) -> None:
        self._edges = edges
        self._risk = risk
        self._cohorts: list[_Cohort] = []  # oldest first
        self._starts: list[float] = []
        self._crossings: list[tuple[float, int, _Cohort]] = []  # by when they come into the next bin
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._cohorts)

    def advance(self, now: float) -> None:
        crossings = self._crossings
        while crossings and crossings[0][0] <= now:
            _, _, cohort = heapq.heappop(crossings)
            if not cohort.joined:
                cohort.bin += 1
                for row, blocks in enumerate(cohort.alive):
                    self._risk[row][cohort.bin] += blocks
                self._join(cohort, now)
                if not cohort.joined:
                    self._expect(cohort)

    def add(self, now: float, row: int, blocks: int) -> None:
        """Adds blocks that are used now: they are at risk from now on."""
        last = self._cohorts[-1] if self._cohorts else None
        if last is None or last.bin or now - last.start > self._edges[0] / 2:
            last = _Cohort(now, len(self._risk))
            self._cohorts.append(last)
            self._starts.append(now)
            self._expect(last)
        last.end = now
        last.alive[row] += blocks
        self._risk[row][0] += blocks

    def take(self, used: float, row: int, blocks: int) -> int:
        """These, used at `used` for the last time, are at risk no more. The bin of their age."""
        cohort = self._cohorts[bisect_right(self._starts, used) - 1]
        cohort.alive[row] -= blocks
        return cohort.bin

    def _expect(self, cohort: _Cohort) -> None:
        if cohort.bin + 1 < len(self._edges):
            self._sequence += 1
            when = cohort.start + self._edges[cohort.bin + 1]
            heapq.heappush(self._crossings, (when, self._sequence, cohort))

    def _join(self, cohort: _Cohort, now: float) -> None:
        at = bisect_right(self._starts, cohort.start) - 1
        older = self._cohorts[at - 1] if at else cohort
        if (
            older is not cohort
            and older.bin == cohort.bin
            and (cohort.end - older.start) * FINENESS <= now - older.start
        ):
            older.end = cohort.end
            older.alive = [a + b for a, b in zip(older.alive, cohort.alive, strict=True)]
            cohort.joined = True
            del self._cohorts[at], self._starts[at]
