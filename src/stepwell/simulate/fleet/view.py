"""A router's belief about the blocks that engines hold, from their events, which come late."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.traces.forest import BlockRun
from stepwell.simulate.traces.trace import Trace


class LevelWatch(Protocol):
    """Receives changes of a level's content."""

    def changed(self, run: BlockRun, *, held: bool) -> None: ...

    def lost(self) -> None:
        """The level has lost everything."""


class Unseen:
    """Ignores all changes."""

    def changed(self, run: BlockRun, *, held: bool) -> None:
        pass

    def lost(self) -> None:
        pass


class View:
    """A bit for each block and place, where a place is the GPU of an engine or a tier of a host; every change is seen
    `stale_s` later, in the order in which it was."""

    def __init__(self, clock: EventClock, trace: Trace, places: int, stale_s: float) -> None:
        self._clock = clock
        self._ids = trace.ids
        self._held = np.zeros((places, trace.distinct), np.bool_)
        self._stale_s = stale_s
        self._news: deque[tuple[float, int, int, int, bool]] = deque()

    def watch(self, place: int) -> LevelWatch:
        return _Place(self, place)

    def tell(self, place: int, base: int, size: int, *, held: bool) -> None:
        """Reports the ids [base, base + size) of the trace as held or not; all blocks if the size is -1."""
        self._news.append((self._clock.now + self._stale_s, place, base, size, held))

    def of(self, first: int, last: int) -> NDArray[np.bool_]:
        """[places, blocks]: what each place is believed to hold of these ids."""
        while self._news and self._news[0][0] <= self._clock.now:
            _, place, base, size, held = self._news.popleft()
            if size < 0:
                self._held[place] = False
            else:
                self._held[place, self._ids[base : base + size]] = held
        held_now: NDArray[np.bool_] = self._held[:, self._ids[first:last]]
        return held_now


class _Place:
    def __init__(self, view: View, place: int) -> None:
        self._view, self._place = view, place

    def changed(self, run: BlockRun, *, held: bool) -> None:
        self._view.tell(self._place, run.base, run.size, held=held)

    def lost(self) -> None:
        self._view.tell(self._place, 0, -1, held=False)
