"""Time for the ages of blocks, which is bounded in bursts and in silence."""

from __future__ import annotations

from typing import Final

MIN_S: Final = 1 / 16
"""A use takes at least so long: what matters of many at once, or of a trace without times, is their order. Four go
into the first bin of `reuse`."""

SILENCE: Final = 16.0
"""Times the mean between uses that a silence counts at most: nothing is asked for in it, so nothing grows old."""

_USES: Final = 256  # uses that the mean covers, roughly
_FASTEST: Final = 64.0  # times the mean that one of them counts: it may grow by a quarter with each


class Pace:
    """`time` is in seconds from the first use on. Where uses come steadily, at most 16 a second, it passes as on the
    clock; faster ones advance it as if they came so. A use is all that is used at one moment: mostly a request; in the
    well some, since it hears of what was found and of what was computed apart."""

    def __init__(self) -> None:
        self.time = 0.0
        self._now: float | None = None
        self._mean = 1.0

    def advance(self, now: float) -> bool:
        """False: it is still the moment of the last use."""
        if now == self._now:
            return False
        if self._now is not None:
            took = max(MIN_S, now - self._now)
            self._mean += (min(took, _FASTEST * self._mean) - self._mean) / _USES
            self.time += min(took, SILENCE * self._mean)
        self._now = now
        return True
