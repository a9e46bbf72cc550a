"""Replay of one trace on one tier with one policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepwell.policies.catalog import TierPolicy
from stepwell.simulate.store import Store
from stepwell.simulate.traces.forest import Cost
from stepwell.simulate.traces.trace import Ints, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """`hits`: number of blocks of each request that its leading run found, [n]. `entered`: blocks that were let in,
    counted each time."""

    hits: Ints
    entered: int


class Replay:
    """A replay. Requests come one after the other, each with all its blocks; each finds the leading run of them that
    the tier holds, and then the rest is computed and offered to it."""

    def __init__(self, trace: Trace, policy: TierPolicy, capacity: int, cost: Cost) -> None:
        """`capacity` in blocks."""
        self._trace = trace
        self._store = Store(trace, policy, capacity, cost)

    def run(self) -> Replayed:
        trace = self._trace
        times, starts = trace.times.tolist(), trace.starts.tolist()
        hits = np.zeros(len(trace), np.int64)
        for i, time in enumerate(times):
            hits[i] = self._request(time, starts[i], starts[i + 1])
        return Replayed(hits, self._store.entered)

    def _request(self, time: float, first: int, last: int) -> int:
        path = self._store.refer(time, first, last)
        hits = known = 0
        while known < len(path) and path[known].held:
            hits += path[known].size
            known += 1
        # Found items are offered only for their end, which may be evictable again.
        self._store.offer(path[max(0, known - 1) :])
        return hits
