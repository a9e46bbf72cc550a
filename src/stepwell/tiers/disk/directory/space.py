"""Space that a directory of the disk tier may take of its filesystem, and pauses after errors of the device."""

from __future__ import annotations

import errno

from stepwell.io.clock import Clock

FULL_S = 5.0
"""Seconds after an ENOSPC during which no file is created."""

ILL_S, MAX_ILL_S = 1.0, 300.0
"""Seconds without writes after a write failed: doubled with each failure up to the maximum, until a write succeeds."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """The space would be taken from the reserve."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "it would take the free space that is reserved for others")


class Space:
    """Space in bytes. `used`: size of all files that look like segments, those about to be deleted included;
    `leaving`: size of the latter."""

    def __init__(self, limit: int, reserve: int, clock: Clock) -> None:
        self.limit = limit
        self.reserve = reserve
        self.used = 0
        self.leaving = 0
        self._clock = clock
        self._full_until = 0.0
        self._ill_until = 0.0
        self._ill_s = ILL_S

    def may_take(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.limit and self._clock.now() >= self._full_until

    @property
    def over(self) -> bool:
        """Files take more than the limit, even without those about to be deleted."""
        return self.used - self.leaving > self.limit

    @property
    def ill(self) -> bool:
        """A write failed a short while ago. Writes pause, so that a disk that can still be read does not lose segment
        after segment to writes that fail."""
        return self._clock.now() < self._ill_until

    def trouble(self, error: BaseException, *, growing: bool = False) -> str:
        """Notes that a write, or, `growing`, the creation of a file has failed; returns the kind of the error. Only a
        creation pauses others for lack of space: a file that is written to has its space already, unless the filesystem
        allocates late."""
        lacks_room = isinstance(error, OSError) and error.errno in _NO_SPACE
        if lacks_room and growing:
            self._full_until = self._clock.now() + FULL_S
        elif isinstance(error, OSError) and not isinstance(error, NoRoom):
            self._ill_until = self._clock.now() + self._ill_s
            self._ill_s = min(2 * self._ill_s, MAX_ILL_S)
        return "no_space" if lacks_room else "write"

    def wrote(self) -> None:
        self._ill_s = ILL_S
