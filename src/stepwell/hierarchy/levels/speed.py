"""Read speed of one tier, learned from the reads that it answered, and when it is probed to find out."""

from __future__ import annotations

from stepwell.io.clock import Clock
from stepwell.policies.costs.transfer import TierSpeed, TransferFit
from stepwell.policies.probe import Probing


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
