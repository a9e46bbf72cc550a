"""When a tier that is refused is asked all the same, so that it is not refused for ever.

A probe reads a few blocks that nobody waits for. It costs no request anything but the tier's and the arena's time, and
of the tier's time at most one part in a hundred, or one probe a minute: a tier that hung during one is not left alone
for a hundred times as long.
"""

from __future__ import annotations

import math

PAUSE_S = 5.0
"""At least, between two probes of a tier or a read and a probe: what is known is fresh."""

SHARE = 0.01
"""Of a tier's time that may go into probes."""

LONGEST_S = 60.0
"""After which the next probe is due at the latest. Nothing is expected of the last one any more then: it found no room,
or the tier hangs."""

PROBE_BYTES = 2 << 20


class Probing:
    """One tier's. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._next = -math.inf
        self._under_way = False

    def begin(self, now: float) -> bool:
        """True: a probe is due, and begins."""
        if now < self._next:
            return False
        self._under_way, self._next = True, now + LONGEST_S
        return True

    def read(self, now: float, seconds: float) -> None:
        """A read of the tier has ended, of a probe or not."""
        pause = seconds / SHARE if self._under_way else 0.0
        self._under_way, self._next = False, now + min(max(PAUSE_S, pause), LONGEST_S)
