"""Engines that are killed beside another one, whose recalls stay right, and whose well gives back what they held."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from lab.rig.well import until
from lab.trust.budget import Budget
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.ground import Ground, ground
from lab.trust.kills.lanes import Tally
from lab.trust.kills.processes import PATIENCE_S, ForkServer, Life
from lab.trust.kills.victims import BLOCKS, HOW
from lab.trust.kills.work import HELD, recall, stats

MODEL, SHARD_BYTES = "one", 256 << 10
_HOST_MIB = 64
_ROUND = _HOST_MIB * (1 << 20) // (SHARD_BYTES * BLOCKS)
"""Chains that fill the arena: then each slot has been used again, if it may be."""


def kills(budget: Budget, number: int, kills: int) -> Tally:
    """A lane: one well and one engine that stays."""
    with ground() as place, ForkServer(place) as wells, ForkServer(place) as victims:
        disk = f"{place.disk}:256MiB"
        well = wells.well(place.home, {"host": f"{_HOST_MIB}MiB", "disk": disk, "disk_reserve": "1MiB"})
        well.ready()
        with Engine(place.home, MODEL, SHARD_BYTES) as engine:
            engine.joined(PATIENCE_S)
            beside = Beside(place, engine, victims, budget.dice("kills", "engines", number))
            while beside.tally.n["kills"] < kills and not budget.over and not engine.lost:
                beside.one()
            if engine.lost:
                beside.tally.violated("left", f"the well ended: {place.said()}")
        return beside.tally


@dataclass(slots=True)
class Beside:
    """Counts: `kills`, of them `haunts` with slots in quarantine; blocks that were recalled `right`, and `theirs` among
    them, which a killed engine had spilled. Violations: `wrong` blocks; `left` over slots and sessions."""

    place: Ground
    engine: Engine
    victims: ForkServer
    dice: random.Random
    tally: Tally = field(default_factory=Tally)
    _numbers: Counter[str] = field(default_factory=Counter)
    _spilled: deque[Chain] = field(default_factory=lambda: deque(maxlen=2 * _ROUND))

    def order(self, how: str, *, held: bool = False) -> tuple[Life, int]:
        """A victim, and the first of its chains."""
        self._numbers["victim"] += 1
        first = self._numbers["victim"] << 32
        order = {"home": str(self.place.home), "model": MODEL, "shard_bytes": SHARD_BYTES, "how": how, "first": first}
        return self.victims.engine(held=held, **order), first

    def one(self, how: str = "") -> None:
        how = how or self.dice.choice([how for how in HOW if how != "once"])
        victim, first = self.order(how)
        try:
            if not victim.ready():
                self.tally.violated("left", f"an engine did not begin: {victim.wait()} {self.place.said()}")
                return
            self._go_on(victim, how)
        finally:
            victim.kill()
            victim.wait()
        self.is_dead(first)

    def is_dead(self, first: int) -> None:
        """The victim with these chains was killed: what is there of it is right, and nothing is held for it."""
        self.tally.n["kills"] += 1
        theirs = sum(recall(self.engine, Chain(first + n, BLOCKS), self.tally) for n in range(8))
        self.tally.n["theirs"] += theirs
        self.given_back()

    def _go_on(self, victim: Life, how: str) -> None:
        """Works beside the victim: for a while, or, beside a zombie, until all that may be used again was."""
        if how == "copy":
            end = time.monotonic() + self.dice.random() * 0.1
            while time.monotonic() < end:
                self.work()
            return
        if until(lambda: stats(self.place.home)["quarantined_slots"] > 0):
            self.tally.n["haunts"] += 1
        for _ in range(_ROUND):
            self.work()
        held = stats(self.place.home)["quarantined_slots"]
        if not held and victim.alive():
            self.tally.violated("left", "slots were given back before their writer was dead")

    def work(self) -> None:
        self._numbers["ours"] += 1
        self._spilled.append(Chain(self._numbers["ours"], BLOCKS))
        self.engine.spill(self._spilled[-1])
        recall(self.engine, self.dice.choice(self._spilled), self.tally)
        recall(self.engine, self._spilled[-1], self.tally)

    def given_back(self) -> None:
        def nothing_held() -> bool:
            figures = stats(self.place.home)
            return figures["sessions"] == 1 and not any(figures[name] for name in HELD)

        if not until(nothing_held):
            figures = stats(self.place.home)
            self.tally.violated("left", f"after a kill: {[(name, figures[name]) for name in ('sessions', *HELD)]}")
