"""Rhythm of a conversation: the times between its turns so far, and the window in which the next one is expected.

Mean and mean deviation of the observed times, the last few weighing most, as TCP estimates round-trip times (Jacobson,
"Congestion avoidance and control", SIGCOMM 1988; RFC 6298); of their logarithms, since people and tools take times that
differ by factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MIN_TIMES: Final = 2
"""Times between turns that must be known."""

LONGEST_S: Final = 3600.0
"""A conversation that pauses for longer has no rhythm."""

WEIGHT: Final = 0.25
"""Least weight of the last time."""

MIN_DEVIATION, MAX_DEVIATION = 0.05, 0.5
"""Bounds of the deviation of logarithms. No conversation is more regular than the first; for one that is less regular
than the second no turn is expected."""

EARLY, LATE = 2.0, 3.0
"""Deviations before and behind the mean, within which a turn is expected."""


@dataclass(frozen=True, slots=True)
class ExpectedWindow:
    """Seconds after a turn, between which the next one is expected."""

    opens: float
    closes: float


class Rhythm:
    """Rhythm of one conversation."""

    __slots__ = ("_deviation", "_mean", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._mean = 0.0
        self._deviation = 0.0

    def took(self, seconds: float) -> None:
        """A turn came this many seconds after the one before."""
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
    def window(self) -> ExpectedWindow | None:
        """The window after the last turn; None: no turn is expected."""
        if self._times < MIN_TIMES or self._deviation > MAX_DEVIATION:
            return None
        deviation = max(self._deviation, MIN_DEVIATION)
        return ExpectedWindow(math.exp(self._mean - EARLY * deviation), math.exp(self._mean + LATE * deviation))
