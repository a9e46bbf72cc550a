"""What all of these benchmarks are given: how much to do, how long, and where to keep what another run goes on from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

SECONDS = 450.0
QUICK_SECONDS = 55.0
SKIPPED = "skipped: the time was used up"


@dataclass(frozen=True, slots=True)
class Stage:
    """`deadline`, of `time.monotonic`: what is not begun by then is left out, and said to be. `kept`: the folder of
    results; None where nothing is kept."""

    quick: bool
    deadline: float
    kept: Path | None = None

    @classmethod
    def begin(cls, quick: bool, kept: Path | None, seconds: float | None = None) -> Stage:
        limit = seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS
        return cls(quick, time.monotonic() + limit, kept)

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def over(self) -> bool:
        return not self.left
