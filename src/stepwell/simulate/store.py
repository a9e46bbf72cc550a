"""Content of a tier in a replay, and its evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stepwell.policies.catalog import TierPolicy
from stepwell.policies.past import Past, most_remembered
from stepwell.simulate.traces.forest import BlockRun, Cost, Forest
from stepwell.simulate.traces.trace import Trace

MOMENT_S: Final = 1e-6
"""Seconds between two requests that come at the same time, so that policies can order them."""


class Store:
    """`capacity` blocks under one policy. For each request: `refer`, and when its blocks are there `offer`.

    Where every request is offered all its blocks, what is held is closed under prefixes, so no block is held that
    cannot be used. `left(run)` is called when a run has left."""

    def __init__(
        self,
        trace: Trace,
        policy: TierPolicy,
        capacity: int,
        cost: Cost,
        left: Callable[[BlockRun], None] | None = None,
    ) -> None:
        self._capacity = capacity
        self._eviction, self._admission = policy.eviction, policy.admission
        self._forest = Forest(trace, cost, self._parted)
        self._past = Past[BlockRun](most_remembered(capacity), self._forget)
        self._left = left
        self._now = -1.0
        self.held = 0  # blocks
        self.entered = 0  # blocks, each time

    def refer(self, time: float, first: int, last: int) -> list[BlockRun]:
        """A request asks for the ids [first, last) of the trace: their runs, head to tail."""
        self._now = now = max(time, self._now + MOMENT_S)
        path = self._forest.path(first, last)
        for run in reversed(path):
            self._refer(run, now)
        return path

    def path(self, first: int, last: int) -> list[BlockRun]:
        """The runs of ids that were asked for before."""
        return self._forest.path(first, last)

    def offer(self, path: Sequence[BlockRun], most: int | None = None) -> list[BlockRun]:
        """Lets in what of these runs is not held, head to tail, until something is refused; not more than `most`
        blocks. Returns what came in and is still there: a head may displace its own tail, and so make a gap behind
        which nothing is let in."""
        came: list[BlockRun] = []
        for run in path:
            if run.held:
                continue
            if run is not path[0] and run.parent is not None and not run.parent.held:
                break
            if most is not None and run.size > most:
                if not most:
                    break
                self._forest.cut(run, most)
                self._let_in(run, came)
                break
            whole = self._let_in(run, came)
            if most is not None:
                most -= run.size
            if not whole:
                break
        self.settle(path)
        return [run for run in came if run.held]

    def settle(self, path: Sequence[BlockRun]) -> None:
        """No more blocks of these runs come in for now."""
        for run in reversed(path):
            if run.held:
                self._eviction.offer(run)
            else:
                self._past.remember(run)

    def _let_in(self, run: BlockRun, came: list[BlockRun]) -> bool:
        """Whether all of it is held now; a part may be."""
        if run.left or not run.uses:
            self._now += MOMENT_S  # it has left since it was asked for: a use puts it back
            self._refer(run, self._now)
        if run.parent is not None:
            run.parent.children += 1  # first of all, so that room is not made by evicting it
        room = self._room_for(run)
        if not room:
            self._without(run.parent)
            return False
        whole = room >= run.size
        if not whole:
            self._forest.cut(run, room)
        run.held = True
        self._past.came(run)
        self.held += run.size
        self.entered += run.size
        self._eviction.enter(run)
        came.append(run)
        return whole

    def _room_for(self, run: BlockRun) -> int:
        """Number of the run's blocks that find room. Evicts blocks of less value by the admission."""
        room = self._capacity - self.held
        if room and not self._admission.admits(run, None):
            return 0
        while room < run.size:
            victim = self._eviction.victim()
            if victim is None or not self._admission.admits(run, victim):
                return room
            assert isinstance(victim, BlockRun)
            if victim.size > run.size - room:
                victim = self._forest.cut(victim, victim.size - (run.size - room))
            self._evict(victim)
            room = self._capacity - self.held
        return run.size

    def _evict(self, run: BlockRun) -> None:
        run.held, run.left = False, True
        self.held -= run.size
        self._eviction.leave(run)
        self._past.remember(run)
        self._without(run.parent)
        if self._left is not None:
            self._left(run)

    def _without(self, parent: BlockRun | None) -> None:
        """One child less of this run is held."""
        if parent is not None:
            parent.children -= 1
            if parent.held:
                self._eviction.offer(parent)

    def _refer(self, run: BlockRun, now: float) -> None:
        self._eviction.refer(run, now)
        run.uses += 1
        run.used = now
        run.left = False

    def _parted(self, head: BlockRun, tail: BlockRun) -> None:
        self._eviction.split(head, tail)
        if tail.uses and not tail.held:
            self._past.remember(tail)

    def _forget(self, run: BlockRun) -> None:
        self._eviction.forget(run)
        run.uses = 0


def stretches(path: Iterable[BlockRun]) -> list[tuple[int, int]]:
    """Positions [first, last) of the blocks of a path that are held, in order."""
    found: list[tuple[int, int]] = []
    for run in path:
        if run.held:
            first, last = run.start, run.start + run.size
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
    return found
