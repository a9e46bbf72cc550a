"""Probes of a tier that is refused, so that it is not refused for ever.

A probe reads a few blocks that no request waits for. It takes only time of the tier and the arena, and of the tier's
time at most one hundredth, or one probe a minute: a tier that hung during a probe is not left alone for a hundred times
as long.
"""

from __future__ import annotations

import math

PAUSE_S = 5.0
"""Least seconds between two probes of a tier, or a read and a probe: its speed is known until then."""

SHARE = 0.01
"""Largest share of a tier's time that is spent on probes."""

LONGEST_S = 60.0
"""Most seconds until the next probe. The last one is given up then: it found no room, or the tier hangs."""

PROBE_BYTES = 2 << 20


class Probing:
    """Probes of one tier. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._next = -math.inf
        self._under_way = False

    def begin(self, now: float) -> bool:
        """True if a probe is due; it then begins."""
        if now < self._next:
            return False
        self._under_way, self._next = True, now + LONGEST_S
        return True

    def read(self, now: float, seconds: float) -> None:
        """A read of the tier has ended, of a probe or of a request."""
        pause = seconds / SHARE if self._under_way else 0.0
        self._under_way, self._next = False, now + min(max(PAUSE_S, pause), LONGEST_S)
