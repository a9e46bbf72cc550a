"""The time that a read of a healthy tier may take, learned from the reads that it answered."""

from __future__ import annotations

from stepwell.protocol.messages import MOST_ALLOWED_S

KNOWN = 2048
"""Reads that have to be known before less than MOST_ALLOWED_S is allowed. Shared and virtual devices hold a read back
for a tenth of a second about once in a thousand (measured; docs/design/adr/0009): fewer would not have seen it."""


class HealthyReads:
    """The slowest of the last KNOWN to 2 x KNOWN reads, at most MOST_ALLOWED_S, which it is until so many are known."""

    def __init__(self) -> None:
        self._count = 0
        self._slowest, self._before = 0.0, MOST_ALLOWED_S

    def took(self, seconds: float) -> None:
        self._count += 1
        self._slowest = max(self._slowest, seconds)
        if self._count == KNOWN:
            self._count, self._before, self._slowest = 0, self._slowest, 0.0

    @property
    def slowest_s(self) -> float:
        return min(MOST_ALLOWED_S, max(self._slowest, self._before))
