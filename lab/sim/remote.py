"""A second level below the arena: a tier that other wells share, late, broken now and then, whose blocks appear and
vanish without this well's doing.

Its dice are its own, so that a walk without it does what it always did.
"""

from __future__ import annotations

from random import Random

from lab.sim.world import World
from stepwell.testing.remote_tier import Store
from stepwell.tiers.faulty import TierFaults

CHANGES, HEALS, VANISHES, APPEARS = 0.01, 0.02, 0.01, 0.02
"""In a step."""

_FAULTS = ("fail", "flip", "swap", "lose", "hang")


class Remote:
    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._store = world.around.store
        self._dice = Random(f"remote {seed}")
        self._vanished: Store = {}
        world.setup = world.around.setup = world.setup.with_remote()

    def step(self) -> None:
        if self._world.clearing:  # others have nothing of it that could come back
            self._vanished.clear()
            return
        draw = self._dice.random()
        if draw < CHANGES:
            fault, often = self._dice.choice(_FAULTS), self._dice.choice((0.02, 0.3, 1.0))
            self._set(TierFaults(**{fault: often}))
            self._world.seen[f"remote: {fault}"] += 1
        elif draw < CHANGES + HEALS:
            self._set(TierFaults())
        elif draw < CHANGES + HEALS + VANISHES and self._store:
            id = self._dice.choice(list(self._store))
            self._vanished[id] = self._store.pop(id)
            self._world.seen["remote: vanished"] += 1
        elif draw < CHANGES + HEALS + VANISHES + APPEARS and self._vanished:
            id = self._dice.choice(list(self._vanished))
            self._store[id] = self._vanished.pop(id)
            self._world.seen["remote: appeared"] += 1

    def end(self) -> None:
        """Others leave it alone from now on."""
        self._set(TierFaults())

    def _set(self, faults: TierFaults) -> None:
        far = self._world.life.far if self._world.life is not None else None
        if far is not None:
            far.faults = faults
            if not faults.hang:
                far.release()
            self._world.trace("remote", faults)
