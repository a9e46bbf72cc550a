"""How much a campaign may try, and with which dice."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field


def _tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Budget:
    """`scale` None: the sizes that CI runs; else a share of the full ones, 1.0 being all. `until`: of the monotonic
    clock, in seconds; a campaign that is `over` time ends early and says how many cases it tried. `tell` shows
    progress."""

    seed: int
    scale: float | None = None
    until: float = float("inf")
    tell: Callable[[str], None] = field(default=_tell)

    def of(self, ci: int, full: int) -> int:
        """Cases to try: `ci`, or this scale's share of `full`, at least one."""
        return ci if self.scale is None else max(1, round(full * self.scale))

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def processes(self) -> int:
        """How many processes may work at the same time."""
        return len(os.sched_getaffinity(0))

    def dice(self, *names: str | int) -> random.Random:
        """A generator of its own for each part of a campaign, the same for the same seed and names."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, names))}")
