"""One tier, one policy, one trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from stepwell.policies.catalog import Policy
from stepwell.policies.past import Past, most_remembered
from stepwell.simulate.forest import Cost, Forest, Run
from stepwell.simulate.trace import Ints, Trace

_MOMENT_S: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """hits: blocks [n] of each request that its leading run found. entered: blocks that were let in, each time."""

    hits: Ints
    entered: int


class Replay:
    """Requests come one after the other, each with all its blocks; each finds the leading run of them that the tier
    holds, and then the rest is computed and offered to it. What the tier holds is closed under prefixes, so no block
    is held that cannot be used."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, cost: Cost) -> None:
        """`capacity` in blocks."""
        self._trace = trace
        self._capacity = capacity
        self._eviction, self._admission = policy.eviction, policy.admission
        self._forest = Forest(trace, cost, self._parted)
        self._past = Past[Run](most_remembered(capacity), lambda run: run.held, self._forget)
        self._held = 0
        self._entered = 0

    def run(self) -> Replayed:
        trace = self._trace
        times, starts = trace.times.tolist(), trace.starts.tolist()
        hits = np.zeros(len(trace), np.int64)
        now = -1.0
        for i, time in enumerate(times):
            now = max(time, now + _MOMENT_S)
            hits[i] = self._request(now, starts[i], starts[i + 1])
        return Replayed(hits, self._entered)

    def _request(self, now: float, first: int, last: int) -> int:
        path = self._forest.path(first, last)
        for run in reversed(path):
            self._eviction.refer(run, now)
            run.uses += 1
            run.used = now
        hits = known = 0
        while known < len(path) and path[known].held:
            hits += path[known].size
            known += 1
        for run in path[known:]:
            if not self._let_in(run):
                break
        for run in reversed(path):
            if run.held:
                self._eviction.offer(run)
                break
            self._past.remember(run)
        return hits

    def _let_in(self, run: Run) -> bool:
        """Whether all of it is held now; a part may be."""
        if run.parent is not None:
            run.parent.children += 1  # first of all, so that room is not made by evicting it
        room = self._room_for(run)
        if not room:
            if run.parent is not None:
                run.parent.children -= 1
                self._eviction.offer(run.parent)
            return False
        whole = room >= run.size
        if not whole:
            self._forest.cut(run, room)
        run.held = True
        self._held += run.size
        self._entered += run.size
        self._eviction.enter(run)
        return whole

    def _room_for(self, run: Run) -> int:
        """How many of its blocks find room. Evicts what the admission thinks is worth less."""
        room = self._capacity - self._held
        if room and not self._admission.admits(run, None):
            return 0
        while room < run.size:
            victim = self._eviction.victim()
            if victim is None or not self._admission.admits(run, victim):
                return room
            assert isinstance(victim, Run)
            if victim.size > run.size - room:
                victim = self._forest.cut(victim, victim.size - (run.size - room))
            self._evict(victim)
            room = self._capacity - self._held
        return run.size

    def _evict(self, run: Run) -> None:
        run.held = False
        self._held -= run.size
        self._eviction.leave(run)
        self._past.remember(run)
        if run.parent is not None:
            run.parent.children -= 1
            self._eviction.offer(run.parent)

    def _parted(self, head: Run, tail: Run) -> None:
        self._eviction.split(head, tail)
        if tail.uses and not tail.held:
            self._past.remember(tail)

    def _forget(self, run: Run) -> None:
        self._eviction.forget(run)
        run.uses = 0
