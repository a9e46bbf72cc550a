"""Read time of a tier, learned from the reads that it answered.

    seconds of a batch = latency + bytes of it x batches side by side / bandwidth

Batches that are read at the same time share the tier, so each takes as long as if it read for all of them. Only reads
count: write speed is unrelated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from stepwell.policies.costs.robust import Fitted, fit

SAMPLES, HALF_LIFE, HALF_LIFE_S = 64, 8, 5.0
"""Batches remembered, and the number of batches and of seconds after which one counts half: a tier's speed depends on
its other users, and the few probes must soon count more than older reads."""

MIN_SAMPLES = 2
REFIT, REFIT_S = 8, 0.2
"""The fit is made again once one in so many of its samples is new, and so many seconds have passed: it costs some
0.5 ms, and a busy tier answers thousands of batches a second."""

FROM_NOTHING = 0.2
"""Weight, in batches, of the assumption that time grows with the bytes."""

MAX_BYTES, MIN_SECONDS, MAX_SECONDS = 1 << 50, 1e-9, 1e6


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """`latency_s` until the first byte, `byte_s` seconds a byte from then on; `doubt`: how far what they say may be
    off, relative, as a standard deviation."""

    latency_s: float
    byte_s: float
    doubt: float = 0.0

    def seconds(self, nbytes: int, queued: int = 0) -> float:
        """Seconds to read `nbytes` behind `queued` bytes that were asked for before; 0 for none."""
        return self.latency_s + (queued + nbytes) * self.byte_s if nbytes > 0 else 0.0


class TransferFit:
    """Learns a TierSpeed. `in_flight`: bytes that are read at a time, so that the latency counts once for as many."""

    def __init__(self, in_flight: int) -> None:
        self._in_flight = max(1, in_flight)
        self._samples: deque[tuple[int, float, float, float]] = deque(maxlen=SAMPLES)
        self._speed: TierSpeed | None = None
        self._new = 0  # samples since it was learned
        self._due = 0.0  # when it may be learned again

    def observe(self, nbytes: int, seconds: float, side_by_side: float = 1.0, at: float = 0.0) -> None:
        """Adds a batch that was read `at` seconds of one clock: its bytes, its seconds, and the mean number of batches
        under way. Impossible values are ignored."""
        if 0 < nbytes <= MAX_BYTES and MIN_SECONDS <= seconds <= MAX_SECONDS and 1 <= side_by_side <= 1e6:
            self._samples.append((nbytes, side_by_side, seconds, at))
            self._new += 1

    @property
    def speed(self) -> TierSpeed | None:
        """The speed; None while too little is known."""
        known = len(self._samples)
        if known >= MIN_SAMPLES and self._new >= max(1, known // REFIT) and (at := self._samples[-1][3]) >= self._due:
            self._new, self._due = 0, at + REFIT_S if known == SAMPLES and at else 0.0
            self._speed = self._learn()
        return self._speed

    def _learn(self) -> TierSpeed:
        rows = np.array(self._samples, np.float64)
        x = np.column_stack([np.ones(len(rows)), rows[:, 0] * rows[:, 1]])
        age = np.arange(len(rows))[::-1] / HALF_LIFE + (rows[-1, 3] - rows[:, 3]) / HALF_LIFE_S
        weights = 0.5 ** np.clip(age, 0, 60)
        fitted: Fitted = fit(x, rows[:, 2], weights, np.array([0.0, 1.0]), FROM_NOTHING)
        latency_s, byte_s = map(float, fitted.coefficients)
        doubt = fitted.doubt(np.array([1.0, float(self._in_flight)]))
        return TierSpeed(latency_s, byte_s + latency_s / self._in_flight, doubt)
