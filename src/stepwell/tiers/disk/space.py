"""How much of its filesystem a directory of the disk tier may have, and when it asks for no more of it."""

from __future__ import annotations

import errno

from stepwell.io.clock import Clock

FULL_S = 5.0
"""How long a filesystem that had no room is not asked for more."""

ILL_S, MOST_ILL_S = 1.0, 300.0
"""How long nothing is written after a device said no: doubled each time, until a write has succeeded."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """Taking this space would leave others less than the reserve."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "it would take the free space that is reserved for others")


class Space:
    """Bytes. `used` by all files that look like segments, ours or not, those that are `leaving` included."""

    def __init__(self, limit: int, reserve: int, clock: Clock) -> None:
        self.limit = limit
        self.reserve = reserve
        self.used = 0
        self.leaving = 0  # of files that are to be deleted
        self._clock = clock
        self._full_until = 0.0
        self._ill_until = 0.0
        self._ill_s = ILL_S

    def may_take(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.limit and self._clock.now() >= self._full_until

    @property
    def over(self) -> bool:
        """There is more than may be, and it is not on its way out."""
        return self.used - self.leaving > self.limit

    @property
    def ill(self) -> bool:
        """The device has refused writes lately: it is left alone for a while, so that a disk that can still be read
        does not lose segment after segment to writes that fail."""
        return self._clock.now() < self._ill_until

    def trouble(self, error: BaseException, *, growing: bool = False) -> str:
        """A write has failed, or, `growing`, the making of a file; what that was. Only the latter may lack room: what
        we write to has its space already, or its filesystem hands it out late and has none to hand out."""
        lacks_room = isinstance(error, OSError) and error.errno in _NO_SPACE
        if lacks_room and growing:
            self._full_until = self._clock.now() + FULL_S
        elif isinstance(error, OSError) and not isinstance(error, NoRoom):
            self._ill_until = self._clock.now() + self._ill_s
            self._ill_s = min(2 * self._ill_s, MOST_ILL_S)
        return "no_space" if lacks_room else "write"

    def wrote(self) -> None:
        self._ill_s = ILL_S
