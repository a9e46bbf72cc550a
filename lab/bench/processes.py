"""Processor time of other processes, to the nanosecond, halting the ones that are not being measured, and how a program
that has started some ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator


def end_orderly() -> None:
    """SIGTERM ends this program as an exception does: what it has halted goes on, what it has started ends, and what it
    has mounted is unmounted."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """User and system time of each process so far, all its threads included, also those that have ended.

    The kernel's clock of each process (`clock_getcpuclockid`), which /proc/PID/stat shows rounded to 10 ms. Processes
    that have ended are left out.
    """
    spent = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            spent[pid] = time.clock_gettime((~pid << 3) | 2)
    return spent


def spent_between(before: dict[int, float], after: dict[int, float]) -> float | None:
    """CPU seconds of all of them together; None if a process came or went, whose time would be missing."""
    if before.keys() != after.keys():
        return None
    return sum(after[pid] - before[pid] for pid in after)


@contextlib.contextmanager
def halted(pids: Iterable[int]) -> Iterator[None]:
    """Stops these processes where they are, so that they use no processor while others are measured."""
    stopped = list(pids)
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
