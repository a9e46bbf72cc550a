"""Whether what is read makes its reader take memory: by what Python says of each case, and by the system's count."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from lab.trust.format.pieces import Tally
from stepwell.block.layout import MiB

_EVERY = 32  # as it makes everything slower
_RSS = 64 * MiB
_COPIES = 3
"""What was received, the message in it and the values in that may each be as long as what is given."""


class Gauge:
    """`most`: bytes that one case may allocate, and `_COPIES` times what it is given. Every 32nd case is measured."""

    def __init__(self, tally: Tally, most: int) -> None:
        self._tally, self._most = tally, most
        self._count = 0
        self._peak = _resident()

    @contextmanager
    def case(self, what: str, given: int = 0) -> Iterator[None]:
        """Counts a case, and what it raises as a violation: `what` is said of it then. `given`: bytes that it reads."""
        self._tally.cases += 1
        self._count += 1
        if self._count % _EVERY:
            yield from self._guarded(what)
            return
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        try:
            yield from self._guarded(what)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        if peak - before > self._most + _COPIES * given:
            self._tally.wrong(f"{what}: {peak - before} bytes were allocated")

    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - nothing may come out of a reader but its own answers
            self._tally.wrong(f"{what}: {type(error).__name__}: {error}")

    def end(self, what: str) -> None:
        """The process has not grown either, by memory that Python does not count."""
        grown = _resident() - self._peak
        if grown > _RSS:
            self._tally.wrong(f"{what}: the process has grown by {grown >> 20} MiB")


def _resident() -> int:
    """The most that this process ever had in memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
