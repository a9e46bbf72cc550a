"""Success of recent guesses: whether to go on guessing."""

from __future__ import annotations

from typing import Final

MIN_GUESSES: Final = 8
"""Guesses before they are judged. The last ones count most: each counts half as much as the one this many after it."""

MIN_RIGHT: Final = 0.5
"""Share of the guesses that must have been right."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""Seconds without guesses after too few were right: the first pause, and the longest; doubled each time."""


class GuessRecord:
    """Record of guesses. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._right = self._all = 0.0
        self._guesses = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0

    def trusted(self, now: float) -> bool:
        """Guesses may be made."""
        return now >= self._until

    @property
    def until(self) -> float:
        """Time from which guesses may be made again."""
        return self._until

    def ended(self, now: float, *, right: bool) -> None:
        """A guess has turned out right or wrong."""
        fade = 0.5 ** (1 / MIN_GUESSES)
        self._right, self._all = fade * self._right + right, fade * self._all + 1
        self._guesses += 1
        if self._guesses < MIN_GUESSES:
            return
        if self._right < MIN_RIGHT * self._all:
            self._until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._right = self._all = 0.0
            self._guesses = 0
        elif self._guesses >= 2 * MIN_GUESSES:
            self._pause_s = FIRST_PAUSE_S
