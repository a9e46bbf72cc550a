"""Whether to go on guessing, by how many of the last guesses were right."""

from __future__ import annotations

from typing import Final

LEAST_GUESSES: Final = 8
"""That are judged together: the last ones, each half as much as the one this many behind it."""

LEAST_RIGHT: Final = 0.5
"""Of them that must have been right."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
"""Without a guess, when too few were: the first, doubled each time that it was so again."""


class Record:
    """Times are seconds of one clock."""

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
        """When they may be made again."""
        return self._until

    def ended(self, now: float, *, right: bool) -> None:
        """A guess turned out so."""
        fade = 0.5 ** (1 / LEAST_GUESSES)
        self._right, self._all = fade * self._right + right, fade * self._all + 1
        self._guesses += 1
        if self._guesses < LEAST_GUESSES:
            return
        if self._right < LEAST_RIGHT * self._all:
            self._until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._right = self._all = 0.0
            self._guesses = 0
        elif self._guesses >= 2 * LEAST_GUESSES:
            self._pause_s = FIRST_PAUSE_S
