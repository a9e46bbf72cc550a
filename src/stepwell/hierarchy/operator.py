"""Operations of an operator: list namespaces, clear tiers, pause and resume."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.block.tier import HOST
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.migration import Migration
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.requests import clearing
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.saved import Kind, PauseRecord
from stepwell.hierarchy.sessions.canaries import CanaryJudge
from stepwell.hierarchy.sessions.registry import SessionRegistry


@dataclass(eq=False)
class Operator:
    _core: Core
    _arena: Arena
    _stack: Stack
    _migration: Migration
    _recalls: Recalls
    _registry: SessionRegistry
    _canaries: CanaryJudge

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers that keep blocks."""
        return frozenset({HOST, *(level.name for level in self._stack.levels if level.keeps)})

    def clear(self, tiers: frozenset[str], namespace: bytes, done: clearing.Cleared) -> None:
        """Drops the blocks of these tiers; of one `namespace`, by its tag, or empty for all. `done` is called from
        `turn`, with what went. Tiers that are not there are left out. Cleared from all, and whole, it leaves the
        quarantine that it was in before."""
        barred = self._canaries.barred if tiers >= self.tiers else []

        def cleared(sums: dict[str, clearing.Sum]) -> None:
            if all(each.whole for each in sums.values()):
                self._canaries.lift(namespace, barred)
            done(sums)

        self.drop(tiers, namespace, cleared)

    def drop(self, tiers: frozenset[str], namespace: bytes, done: clearing.Cleared) -> None:
        """Clears as `clear` does, but lifts no quarantine."""

        def cleared(sums: dict[str, clearing.Sum]) -> None:
            self._core.news.changed = True
            done(sums)

        stack, work = self._stack, self._core.work
        if any(level.name in tiers for level in stack.levels):
            self._migration.cleared(namespace)
        work.walk(clearing.Clearing(self._arena, stack, tiers & self.tiers, namespace, work, cleared).run())

    def pause(self, pause: PauseRecord) -> None:
        """Lets nothing of this kind begin from now on; what has begun ends as usual."""
        if self._core.pauses.pause(pause):
            if pause.kind == "recalls":
                self._core.work.add(self._recalls.pause(list(self._registry.sessions.values())))
            else:
                self._core.work.room_changed()  # work that is parked for a slab goes on now

    def resume(self, kind: Kind, uid: int) -> None:
        """Ends the pause of this kind."""
        if self._core.pauses.resume(kind, uid) and kind == "spills":
            self._migration.spills_resumed()

    def count_namespaces(self, done: clearing.Counted) -> None:
        """`done` is called from `turn`, with what each namespace holds in host memory, by its tag."""
        sessions = list(self._registry.sessions.values())
        known = self._registry.known
        self._core.work.walk(clearing.count(self._arena, sessions, self._canaries.barred, known, done))
