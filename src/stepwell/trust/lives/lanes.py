"""Cases spread over processes, each with a place of its own, and what they count."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from stepwell.trust.budget import Budget

_PR_SET_PDEATHSIG = 1
_MOST_EVIDENCE = 5
_TELL_EVERY = 10


@dataclass(slots=True)
class Tally:
    """Counts by name, and what is told of the first violations of each kind. Every violation is counted."""

    n: Counter[str] = field(default_factory=Counter)
    evidence: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def violated(self, kind: str, what: str, times: int = 1) -> None:
        self.n[kind] += times
        if len(self.evidence[kind]) < _MOST_EVIDENCE:
            self.evidence[kind].append(what)

    def __iadd__(self, other: Tally) -> Tally:
        self.n.update(other.n)
        for kind, told in other.evidence.items():
            self.evidence[kind] = (self.evidence[kind] + told)[:_MOST_EVIDENCE]
        return self


Lane = Callable[[Budget, int, int], Tally]
"""Tries so many cases, the second number; the first is that of the lane, for the dice. A function of a module."""


def spread(budget: Budget, what: str, lane: Lane, cases: int, each: int) -> Tally:
    """Runs lanes of at most `each` cases, as many at a time as there are processors. Raises what a lane raises."""
    total, bare = Tally(), Budget(budget.seed, budget.scale, budget.until)
    context = multiprocessing.get_context("spawn")  # a lane sets its environment, and has threads
    pool = ProcessPoolExecutor(budget.processes, context, initializer=_end_with_us)
    try:
        sizes = [min(each, cases - begun) for begun in range(0, cases, each)]
        lanes = [pool.submit(lane, bare, number, size) for number, size in enumerate(sizes)]
        for done, ended in enumerate(as_completed(lanes), 1):
            total += ended.result()
            if done % _TELL_EVERY == 0:
                budget.tell(f"{what}: {done}/{len(lanes)}")
    finally:
        pool.shutdown(cancel_futures=True)
    return total


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
