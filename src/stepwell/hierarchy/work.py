"""Long work in slices: generators that yield after each block, or a few that are alike, so that others get their
turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import IntEnum

from stepwell.io.clock import Clock

TURN_BLOCKS, TURN_S = 32, 50e-6
"""Blocks looked up, reserved or let go in one turn, and its time: what a ping may have to wait for, and not much less
than a turn costs by itself."""

MAX_TURN_S = 40 * TURN_S
"""Time of a turn at most, however long the rest of the loop takes: threads that open or seal blocks may keep the
interpreter from it for a millisecond each time that it looks for messages."""

WALK_BLOCKS = 8
"""Blocks of a walk in each turn, however much engines want."""

ROOM_WAIT_S = 1.0
"""Seconds that work may be parked for room, before it goes on without: for a slab that is being made or mapped, or for
what is being written below."""


class WorkStep(IntEnum):
    DONE = 1  # one block's worth of work
    PARK = 0  # go on when there may be room


Work = Iterator[int]
"""Each step is as many blocks' worth of work as it says, or WorkStep.PARK."""


class WorkQueue:
    """Pending work of engines, first come first served, and walks through all that is cached, which no request waits
    for: they have what engines leave of a turn. What is cut off by the end of a turn goes on in the next, which is as
    long as what the loop did in between: so work has half of the loop's time, and a few turns do all of it on a machine
    that is busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Work] = deque()
        self._walks: deque[Work] = deque()
        self._parked: deque[tuple[float, Work]] = deque()  # until there may be room, or this time has come
        self._room_changed = False
        self._cut_off: float | None = None  # when the last turn ended, if it left work of engines

    def add(self, *work: Work) -> None:
        self._waiting.extend(work)

    def walk(self, work: Work) -> None:
        """Adds a walk, which may not park."""
        self._walks.append(work)

    def room_changed(self) -> None:
        """Has parked work look again at the next turn."""
        self._room_changed = True

    @property
    def more(self) -> bool:
        """True if there is something to do at once."""
        return bool(self._waiting or self._walks) or (self._room_changed and bool(self._parked))

    @property
    def idle(self) -> bool:
        """True if no engine's work waits, parked or not."""
        return not (self._waiting or self._parked)

    @property
    def next_moment(self) -> float | None:
        """When time alone gives something to do; None: never."""
        return self._parked[0][0] if self._parked else None

    def turn(self) -> None:
        self._unpark()
        seconds = TURN_S
        if self._cut_off is not None:
            seconds = min(MAX_TURN_S, max(TURN_S, self._clock.now() - self._cut_off))
        left = self._some(self._waiting, int(TURN_BLOCKS * seconds / TURN_S), seconds)
        if self._walks:
            self._some(self._walks, max(min(left, TURN_BLOCKS), WALK_BLOCKS), TURN_S)
        self._cut_off = self._clock.now() if self._waiting else None

    def _some(self, queue: deque[Work], budget: int, seconds: float) -> int:
        """Up to so many blocks of a queue's work, for so long; how many were left."""
        until = self._clock.now() + seconds
        while budget > 0 and queue:
            work = queue.popleft()
            for step in work:
                budget = budget - (step or 1) if self._clock.now() < until else 0
                if step is WorkStep.PARK:
                    self._parked.append((self._clock.now() + ROOM_WAIT_S, work))
                    break
                if budget <= 0:
                    queue.appendleft(work)
                    break
            else:
                budget = budget - 1 if self._clock.now() < until else 0
        return budget

    def _unpark(self) -> None:
        """Parked work goes on when there may be room, or gives up waiting after a while."""
        if self._room_changed:
            self._waiting.extend(work for _, work in self._parked)
            self._parked.clear()
            self._room_changed = False
        while self._parked and self._parked[0][0] <= self._clock.now():
            self._waiting.append(self._parked.popleft()[1])
