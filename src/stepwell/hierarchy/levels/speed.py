"""Reads of one tier as measured: its speed, the time that a read of a healthy tier may take, and what becomes of those
that are late."""

from __future__ import annotations

from stepwell.io.clock import Clock
from stepwell.policies.costs.transfer import TierSpeed, TransferFit
from stepwell.policies.probe import Probing
from stepwell.protocol.messages import MAX_ALLOWED_S

KNOWN = 2048
"""Reads that have to be known before less than MAX_ALLOWED_S is allowed. Shared and virtual devices hold a read back
for a tenth of a second about once in a thousand (measured; docs/design/adr/0009): fewer would not have seen it."""

LATE_S = 0.05
"""A read that takes longer is late."""

MEMORY = 15 / 16
"""How much what is known of late reads counts after one more."""


class ReadSpeed:
    """`in_flight`: bytes that the tier is asked for at a time."""

    def __init__(self, clock: Clock, in_flight: int) -> None:
        self._clock = clock
        self._fit = TransferFit(in_flight)
        self._probing = Probing()

    def read(self, nbytes: int, seconds: float, side_by_side: float) -> None:
        """A read has brought so many bytes, beside so many others on average."""
        now = self._clock.now()
        self._fit.observe(nbytes, seconds, side_by_side, now)
        self._probing.read(now, seconds)

    @property
    def known(self) -> TierSpeed | None:
        """The measured speed; None until enough reads have ended."""
        return self._fit.speed

    def probe(self) -> bool:
        """True: a little is to be read now to learn the speed of a tier that requests do not use."""
        return self._probing.begin(self._clock.now())


class HealthyReads:
    """The slowest of the last KNOWN to 2 x KNOWN reads, at most MAX_ALLOWED_S, which it is until so many are known."""

    def __init__(self) -> None:
        self._count = 0
        self._slowest, self._before = 0.0, MAX_ALLOWED_S

    def took(self, seconds: float) -> None:
        self._count += 1
        self._slowest = max(self._slowest, seconds)
        if self._count == KNOWN:
            self._count, self._before, self._slowest = 0, self._slowest, 0.0

    @property
    def slowest_s(self) -> float:
        return min(MAX_ALLOWED_S, max(self._slowest, self._before))


class LateReads:
    """How many late reads came while a request could still wait for them, and how many did not."""

    def __init__(self) -> None:
        self._came = self._missed = 0.0

    def took(self, seconds: float, *, good: bool) -> None:
        if seconds > LATE_S:
            came = good and seconds <= LATE_S + MAX_ALLOWED_S
            self._came, self._missed = MEMORY * self._came + came, MEMORY * self._missed + (not came)

    def worth_s(self, stake_s: float) -> float:
        """Seconds that a late read is worth waiting for, if giving up costs `stake_s`: as many as are lost in vain by
        those that wait for reads that do not come, where the others save as much. One of either kind is assumed that
        nobody has seen. At most MAX_ALLOWED_S."""
        return min(MAX_ALLOWED_S, stake_s * (self._came + 1) / (self._missed + 1))


def allowance_s(healthy: HealthyReads, late: LateReads, oldest_s: float, stake_s: float) -> float:
    """Seconds that a block is worth waiting for in addition to the usual patience: as long as healthy reads take or, if
    giving up costs `stake_s`, as late ones come often enough. A tier whose oldest read under way began `oldest_s`
    seconds ago, longer than any late or healthy one takes, seems to hang: then late ones do not count."""
    if oldest_s > LATE_S + healthy.slowest_s:
        return healthy.slowest_s
    return max(healthy.slowest_s, late.worth_s(stake_s))
