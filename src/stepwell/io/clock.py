"""An injected clock, so that tests can stop it, skip ahead and replay it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back. Does not block."""


class MonotonicClock:
    """The system's monotonic clock. It does not count time in which the machine is suspended."""

    def now(self) -> float:
        return time.monotonic()
