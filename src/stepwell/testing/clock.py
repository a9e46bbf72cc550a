"""A clock that stands still until a test advances it."""

from __future__ import annotations


class SetClock:
    """A `Clock` whose time is an attribute; moving it back is a mistake of the test and raises ValueError."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._seconds += seconds
