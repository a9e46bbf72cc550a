"""When a conversation goes on: the times between its turns so far, and within what time the next is expected.

Mean and mean deviation of what was seen, the last few times weighing most, as TCP learns how long an answer may take
(Jacobson, "Congestion avoidance and control", SIGCOMM 1988; RFC 6298); of the logarithms, since people and tools take
times that differ by factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LEAST_TIMES: Final = 2
"""Between turns, that must be known."""

LONGEST_S: Final = 3600.0
"""A conversation that pauses for longer has no rhythm."""

WEIGHT: Final = 0.25
"""Of the last time, at least."""

LEAST_DEVIATION, MOST_DEVIATION = 0.05, 0.5
"""Of logarithms: nobody is so regular; and of who is no more regular than that nothing is expected."""

EARLY, LATE = 2.0, 3.0
"""Deviations before and behind the mean, within which a turn is expected."""


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds after a turn, between which the next one is expected."""

    opens: float
    closes: float


class Rhythm:
    """One conversation's."""

    __slots__ = ("_deviation", "_mean", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._mean = 0.0
        self._deviation = 0.0

    def took(self, seconds: float) -> None:
        """So long after the turn before came another."""
        if not 0 <= seconds <= LONGEST_S:
            self._times = 0
            return
        x = math.log(max(seconds, 1e-3))
        self._times += 1
        if self._times == 1:
            self._mean, self._deviation = x, 0.0
            return
        weight = max(1 / self._times, WEIGHT)
        off = x - self._mean
        self._mean += weight * off
        self._deviation += weight * (abs(off) - self._deviation)

    @property
    def window(self) -> Window | None:
        """None: nothing is expected."""
        if self._times < LEAST_TIMES or self._deviation > MOST_DEVIATION:
            return None
        deviation = max(self._deviation, LEAST_DEVIATION)
        return Window(math.exp(self._mean - EARLY * deviation), math.exp(self._mean + LATE * deviation))
