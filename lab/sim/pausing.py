"""An operator who pauses and resumes recalls and spills at any moment, and what must hold meanwhile.

Its dice are its own, so that a walk without it does what it always did.
"""

from __future__ import annotations

from random import Random

from lab.sim.engine import Phase
from lab.sim.life import Life
from lab.sim.oracle import Violation
from lab.sim.world import World
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.saved import KINDS, Kind, PauseRecord

PAUSES, RESUMES = 0.02, 0.03
"""In a step, if the well is there."""


class Pausing:
    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._dice = Random(f"pausing {seed}")
        self._paused: set[Kind] = set()
        self._life: Life | None = None
        self._asked = 0  # requests before recalls were paused
        self._leases = 0  # granted by this life before spills were
        self._reads: set[tuple[str, int]] | None = (
            None  # that went on when the pause had come to rest; None: it has not yet
        )

    def step(self) -> None:
        life = self._world.life
        if life is None:
            return
        if life is not self._life:  # it begins with what was paused
            self._life, self._leases, self._reads = life, 0, None
            self._world.seen["began paused"] += bool(self._paused)
        draw = self._dice.random()
        if draw < PAUSES:
            self._pause(life, self._dice.choice(KINDS))
        elif draw < PAUSES + RESUMES:
            kind = self._dice.choice(KINDS)
            self._world.trace("resume", kind)
            self._paused.discard(kind)
            life.hierarchy.operator.resume(kind, 0)
        self._look(life)

    def end(self) -> None:
        """Nothing is paused any more, of the well that there is or of the next one."""
        self._world.around.paused.clear()
        if self._world.life is not None:
            for kind in KINDS:
                self._world.life.hierarchy.operator.resume(kind, 0)

    def _pause(self, life: Life, kind: Kind) -> None:
        if kind == "recalls" and kind not in self._paused:
            self._asked, self._reads = self._world.requests, None
        if kind == "spills" and kind not in self._paused:
            self._leases = life.hierarchy._spills._leases
        self._paused.add(kind)
        self._world.trace("pause", kind)
        self._world.seen[f"paused {kind}"] += 1
        life.hierarchy.operator.pause(PauseRecord(kind, self._world.around.wall(), 0, "a walk"))

    def _look(self, life: Life) -> None:
        well = life.hierarchy
        if self._paused != {pause.kind for pause in well.pauses.all}:
            raise Violation("paused", f"{sorted(self._paused)} should be paused, and {well.pauses.all} is")
        if "spills" in self._paused and (taken := well._spills._leases - self._leases):
            raise Violation("paused", f"{taken} blocks were taken while spills are paused")
        if "recalls" not in self._paused:
            return
        for engine in self._world.engines:
            for request in engine.requests:
                ask = request.ask
                if ask is None or request.number <= self._asked:
                    continue
                if request.phase in (Phase.OFFERED, Phase.COPYING):
                    raise Violation("paused", f"request {request.number} is offered blocks while recalls are paused")
                if ask.answered and not ask.final:
                    raise Violation("late", f"request {request.number} waits ({ask.reason}) while recalls are paused")
        if well._core.work.more or well._core.news.any:
            return  # it has not looked at all of them yet
        if well._recalls.waiting.any:
            raise Violation("late", "requests wait in a well whose recalls are paused")
        if self._reads is None:
            if all(order is None for level in well.stack.levels for order in level.reads.promoting.values()):
                self._reads = _reads(well)
        elif _reads(well) - self._reads:
            raise Violation("paused", "something was read while recalls are paused")


def _reads(well: Hierarchy) -> set[tuple[str, int]]:
    """Reads that are under way, by tier and number."""
    return {(level.name, number) for level in well.stack.levels for number in level.reads.reading}
