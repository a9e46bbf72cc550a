"""A line of wells on one ground, each killed at a random moment, each asked what those before it were told to keep."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab.rig.well import until
from lab.trust.budget import Budget
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.ground import Ground, ground
from lab.trust.kills.lanes import Tally
from lab.trust.kills.processes import PATIENCE_S, ForkServer, Life, Wishes, executed
from lab.trust.kills.work import HELD, joined, recall, recovered, stats, stored
from stepwell.client import control

MIB = 1 << 20
SHARD_BYTES, BLOCKS = 16 << 10, 32
MODELS = ("one", "two")
LEAST, MOST = 64, 256
"""MiB of the disk tier; each life has another size."""

STAGES = {"begun": 0.15, "serves": 0.2, "recovered": 0.15, "told": 0.5}
"""What a life has come to when it is about to be killed, and how often that is: a moment of the life, not of the clock,
so that a busy machine kills in the same places."""

_DELAY_S = 0.05
"""From then to the kill, at most."""

_LIFE_S = 30.0
"""A life that has not come to its stage by then is killed, and should have."""

_FOUND_S = 10.0
"""A read that a busy machine is late with is a miss: it is asked for again until then."""

_AT_FIRST = 2
"""Chains that a life is asked for before it is told to keep others."""

Begin = Callable[[Wishes], AbstractContextManager[Life]]


def by_fork(budget: Budget, number: int, kills: int) -> Tally:
    """A lane of lives that a fork server begins."""
    with ground() as place, ForkServer(place) as server:

        @contextlib.contextmanager
        def begin(wishes: Wishes) -> Any:
            yield server.well(place.home, wishes)

        return Line(place, begin, budget.dice("kills", "fork", number), 0.05).run(budget, kills)


def by_exec(budget: Budget, number: int, kills: int) -> Tally:
    """A lane of lives that are a fresh interpreter each."""
    with ground() as place:
        return Line(place, partial(executed, place), budget.dice("kills", "exec", number), 0.5).run(budget, kills)


@dataclass(slots=True)
class Told:
    """What a well said is on its disk: chains of one model."""

    model: str
    chains: list[Chain]


class Death:
    """SIGKILL some time after the life has come to a stage."""

    def __init__(self, life: Life, stage: str, delay_s: float) -> None:
        self._life = life
        self._stage = stage
        self._delay_s = delay_s
        self._began = time.monotonic()
        self._timers: list[threading.Timer] = []
        self._after(_LIFE_S)

    @property
    def late(self) -> bool:
        return time.monotonic() - self._began >= _LIFE_S

    def reached(self, stage: str) -> None:
        if stage == self._stage:
            self._stage = ""
            self._after(self._delay_s)

    def _after(self, seconds: float) -> None:
        self._timers.append(threading.Timer(seconds, self._life.kill))
        self._timers[-1].start()

    def now(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._life.kill()


@dataclass(slots=True)
class Line:
    """Counts: `kills`, of them `early` before it served; blocks that were recalled `right`, of them `staged` from disk,
    and those that were `asked` for; `told` blocks of the life before, of them `kept`, in `heirs` lives. Violations:
    `wrong` blocks, `cold` lives, `left` over files and processes that did not begin or ended by themselves, and what
    the last wells of `lines` still `held`."""

    place: Ground
    begin: Begin
    dice: random.Random
    start_s: float
    tally: Tally = field(default_factory=Tally)
    spilled: Counter[str] = field(default_factory=Counter)
    told: Told | None = None

    def run(self, budget: Budget, kills: int) -> Tally:
        while self.tally.n["kills"] < kills and not budget.over:
            self._one()
        self._last()
        return self.tally

    def wishes(self, mib: int) -> Wishes:
        threads = self.dice.randint(1, 4)
        return {"host": "64MiB", "disk": f"{self.place.disk}:{mib}MiB", "disk_reserve": "1MiB", "disk_threads": threads}

    def _one(self) -> None:
        (stage,) = self.dice.choices(list(STAGES), list(STAGES.values()))
        with self.begin(self.wishes(self.dice.choice((LEAST, 2 * LEAST, MOST)))) as life:
            delay_s = self.start_s if stage == "begun" else _DELAY_S
            death = Death(life, stage, self.dice.random() * delay_s)
            try:
                death.reached("begun")
                if life.ready():
                    death.reached("serves")
                    self._use(life, death)
                else:
                    self.tally.n["early"] += 1
            finally:
                if death.late:
                    self._left(f"a life came to nothing: {stats(self.place.home)} {self.place.said()}")
                death.now()
                ended = life.wait()
        self.tally.n["kills"] += 1
        if ended.status != -9:
            self._left(f"a well ended by itself: {ended}")
        for stray in self.place.strays():
            self._left(f"{stray} was left behind")
        if self.place.segment_bytes() > MOST * MIB:
            self._left(f"{self.place.segment_bytes()} bytes of segments")

    def _use(self, life: Life, death: Death) -> None:
        told, self.told = self.told, None
        model = told.model if told and self.dice.random() < 0.7 else self.dice.choice(MODELS)
        with Engine(self.place.home, model, SHARD_BYTES) as engine:
            if not (joined(engine, life) and recovered(self.place.home, life)):
                return
            death.reached("recovered")
            if told and told.model == model:
                self._claim(engine, life, told)
            chains: list[Chain] = []
            filled = 0
            for _ in range(_AT_FIRST):
                recall(engine, self._some(model), self.tally)
            while not engine.lost:
                if len(chains) < 6:
                    chains.append(Chain(self.spilled[model], BLOCKS))
                    self.spilled[model] += 1
                    filled += engine.spill(chains[-1])
                recall(engine, self._some(model), self.tally)
                if filled == BLOCKS * len(chains) and stored(self.place.home) == filled:
                    self.told = Told(model, list(chains))
                    death.reached("told")

    def _some(self, model: str) -> Chain:
        """A chain that is likely to be kept, being one of the latest; or any, which may be another model's alone."""
        if self.dice.random() < 0.2:
            return Chain(self.dice.randrange(1 + max(self.spilled.values(), default=0)), BLOCKS)
        return Chain(max(0, self.spilled[model] - 1 - int(self.dice.expovariate(1 / 8))), BLOCKS)

    def _claim(self, engine: Engine, life: Life, told: Told) -> None:
        """What the life before has stored is still there, all of it. Nothing takes any of it away: a kill leaves what
        was written to the kernel, nobody has written since, and where this disk tier, or that of a life in between
        which came to nothing, is smaller, the oldest segments go, while these blocks lie in the newest."""
        asked = kept = 0
        deadline = time.monotonic() + _FOUND_S
        for chain in told.chains:
            while (right := recall(engine, chain, self.tally)) < BLOCKS and time.monotonic() < deadline:
                if engine.lost or not life.alive():
                    break
                time.sleep(0.02)
            if engine.lost or not life.alive():
                break
            asked, kept = asked + BLOCKS, kept + right
        if asked:
            self.tally.n.update(heirs=1, told=asked, kept=kept)
            if kept < asked:
                figures = {name: value for name, value in stats(self.place.home).items() if name.startswith("disk_")}
                self.tally.violated("cold", f"{kept} of {asked} blocks were kept: {figures} {self.place.said(300)}")

    def _last(self) -> None:
        """One that is used, left and asked to end: nobody's slots are held, and no more lies there than may."""
        with self.begin(self.wishes(LEAST)) as life:
            try:
                if not life.ready():
                    self._left(f"the last well did not begin: {life.wait()}")
                    return
                with Engine(self.place.home, MODELS[0], SHARD_BYTES) as engine:
                    if joined(engine, life) and recovered(self.place.home, life):
                        for number in range(max(0, self.spilled[MODELS[0]] - 20), self.spilled[MODELS[0]]):
                            recall(engine, Chain(number, BLOCKS), self.tally)
                self.tally.n["lines"] += 1
                if not until(self._is_quiet):
                    held = f"held by nobody: {stats(self.place.home)}; {self.place.segment_bytes()} on disk"
                    self.tally.violated("held", held)
                control.stop(self.place.home, seconds=PATIENCE_S)
                if (ended := life.wait()).status:
                    self._left(f"the last well did not end as asked: {ended}")
            finally:
                life.kill()
                life.wait()
        for stray in [*self.place.strays(), *([str(self.place.socket)] if self.place.socket.exists() else [])]:
            self.tally.violated("held", f"{stray} was left behind by a well that was asked to end")

    def _is_quiet(self) -> bool:
        figures = stats(self.place.home)
        held = any(figures[name] for name in ("sessions", *HELD))
        return not held and self.place.segment_bytes() <= LEAST * MIB

    def _left(self, what: str) -> None:
        self.tally.violated("left", what)
