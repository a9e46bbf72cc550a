"""One pass over some bytes, and what it took."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """Moving `nbytes` once: seconds by the wall, and of processor time of the whole process."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.wall_s / 1e9

    @property
    def cpu_s_gb(self) -> float:
        return self.cpu_s / self.nbytes * 1e9


def timed(nbytes: int, work: Callable[[], None]) -> Pass:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return Pass(nbytes, wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
