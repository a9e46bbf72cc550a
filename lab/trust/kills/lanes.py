"""Cases spread over processes, each with a place of its own, and what they count."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from lab.trust.budget import Budget
from stepwell.io.process.parent import end_with_parent

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
    """Runs lanes of at most `each` cases, as many at a time as there are processors. Raises what a lane raises. Lanes
    that are still going when this ends otherwise are asked to end, and clean up after themselves."""
    total, bare = Tally(), Budget(budget.seed, budget.scale, budget.until)
    context = multiprocessing.get_context("spawn")  # a lane sets its environment, and has threads
    pool = ProcessPoolExecutor(budget.processes, context, initializer=_end_with_us)
    try:
        sizes = [min(each, cases - begun) for begun in range(0, cases, each)]
        lanes = [pool.submit(_run, lane, bare, number, size) for number, size in enumerate(sizes)]
        for done, ended in enumerate(as_completed(lanes), 1):
            total += ended.result()
            if done % _TELL_EVERY == 0:
                budget.tell(f"{what}: {done}/{len(lanes)}")
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return total


def _run(lane: Lane, budget: Budget, number: int, cases: int) -> Tally:
    try:
        return Tally() if budget.over else lane(budget, number, cases)
    except SystemExit:  # after all that the lane had begun was ended; its pool must not take it for an answer
        os._exit(1)


def _end_with_us() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who spreads, and ends us
    end_with_parent(signal.SIGTERM)
