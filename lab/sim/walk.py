"""A walk: one seed draws a world and thousands of steps in it, each of which may be the last of a well, a connection, a
process or the power. At its end everything that is wrong is put right, and then everything must be well."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from lab.sim.bounds import Bounds
from lab.sim.cuts import Cuts
from lab.sim.engine import Engine, Phase
from lab.sim.limits import TURN_S
from lab.sim.oracle import Violation
from lab.sim.pausing import Pausing
from lab.sim.recovery import comes_back
from lab.sim.remote import Remote
from lab.sim.setup import EPOCHS, Setup
from lab.sim.trace import Trace
from lab.sim.weather import CHANGES, ERRORS, EVERYTHING, FAIR, Weather
from lab.sim.world import World
from stepwell.errors import IntegrityError
from stepwell.hierarchy import audit

STEPS = 1500
"""Of a walk, unless something else is said."""


@dataclass(frozen=True, slots=True)
class Walked:
    """What came of one walk. `digest`: of all events. `right`: blocks recalled and compared. `states`: of disks after
    power cuts that were opened."""

    seed: int
    digest: str
    events: int
    requests: int
    right: int
    states: int
    seen: Counter[str]
    violation: Violation | None


def walk(
    seed: int,
    steps: int = STEPS,
    *,
    cuts: int = 0,
    write: str = "through",
    prefetch: bool = False,
    traffic: bool = False,
    pauses: bool = False,
    remote: bool = False,
    groups: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Walked:
    """The walk of this seed. `cuts`: states after power cuts that are opened on its way, in fair weather and in a
    smaller world. `write`: the wells' write policy; `prefetch`: they guess. `traffic`: now and then a tier hangs while
    requests come all the time; a seed does something else then. `pauses`: an operator pauses and resumes. `remote`:
    there is a second level below the arena. `groups`: most engines have a model with several cache groups. Raises
    nothing: what is wrong is in the answer."""
    trace, dice = Trace(tell), Random(seed)
    setup = Setup.draw(dice, small=cuts > 0, write=write, prefetch=prefetch)
    world = World(setup.with_groups(Random(f"groups {seed}")) if groups else setup, dice, trace)
    probe = Cuts(world, cuts)
    descriptors = _descriptors()
    violation = None
    try:
        Walk(world, fair=cuts > 0, traffic=traffic).run(
            steps, probe, _beside(world, seed, remote=remote, pauses=pauses)
        )
        while _descriptors() > descriptors and gc.collect():
            pass  # mappings of processes that have exited, some of them held by work that the first pass only closes
        if (left := _descriptors() - descriptors) > 0:
            raise Violation("books", f"{left} descriptors are left open")
        world.seen["came to the end"] += 1
    except Violation as raised:
        violation = raised
    except IntegrityError as error:
        violation = Violation("books", str(error))
    except Exception as error:  # noqa: BLE001 - nothing of this may raise, whatever it is
        violation = Violation("books", f"{type(error).__name__} was raised: {error}")
        violation.__cause__ = error
    if violation is not None:
        trace("violation", violation)
        world.abandon()
    seen = world.seen + world.oracle.seen
    return Walked(seed, trace.digest, trace.events, world.requests, world.oracle.right, probe.states, seen, violation)


def _beside(world: World, seed: int, *, remote: bool, pauses: bool) -> Sequence[Pausing | Remote]:
    """Not kept by the caller: what they know of a life keeps its descriptors."""
    return [*([Remote(world, seed)] if remote else []), *([Pausing(world, seed)] if pauses else [])]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Walk:
    """`fair`: no fault but the end of processes, wells and power. `traffic`: tiers hang beside it, and engines with new
    weights come and go."""

    def __init__(self, world: World, *, fair: bool = False, traffic: bool = False) -> None:
        self._world = world
        self._dice = dice = world.dice
        rules: dict[Callable[[], None], float] = {
            self._join: 3,
            self._ask: 20,
            self._spill: 14,
            self._abort: 2,
            self._cut: 0.3,
            self._exit: 0.3,
            self._clear: 0.4,
            self._kill: 0.15,
            self._stop: 0.1,
            self._power: 0.15,
        }
        if not fair:
            rules |= {
                self._change_weather: 2,
                self._heal: 2,
                self._rot: 1,
                self._delete: 0.1,
                self._jump: 1,
                self._refuse_memory: 0.5,
                self._take_space: 0.5,
            }
        if traffic:
            rules |= {self._hang_beside_traffic: 0.6, self._renew: 0.6}
        often = (self._join, self._ask, self._spill, self._heal, self._hang_beside_traffic, self._renew)
        for rule in rules:
            if rule not in often and dice.random() < 0.25:
                rules[rule] = 0.0  # no walk has everything: so each has more of the rest
        self._rules, self._weights = list(rules), list(rules.values())
        self._pace = dice.choice((0.0005, 0.002, 0.01))
        self._checks = dice.choice((0.1, 0.3))
        self._traffic_until = 0.0
        world.around.wall_offset += dice.randrange(1000)

    def run(self, steps: int, cuts: Cuts, beside: Sequence[Pausing | Remote]) -> None:
        world, dice = self._world, self._dice
        world.open()
        bounds = Bounds(world)
        for step in range(steps):
            world.trace("step", step, round(world.clock.now(), 6))
            world.clock.advance(dice.random() * self._pace * (1 if dice.random() < 0.97 else 100))
            self._breathe()
            if dice.random() < 0.3:
                dice.choices(self._rules, self._weights)[0]()
            if world.clock.now() < self._traffic_until:
                self._ask(later=True)
            if dice.random() < self._checks and world.life is not None:
                audit.hierarchy(world.life.hierarchy)
            bounds.look()
            for each in beside:
                each.step()
            cuts.perhaps()
        for each in beside:
            each.end()
        comes_back(world)

    # what goes on all the time ----------------------------------------------------------------------------------------

    def _breathe(self) -> None:
        """Messages arrive, jobs go on, copies too, and schedulers come to their requests: some of all that."""
        world, dice = self._world, self._dice
        if world.life is None:
            if dice.random() < 0.1:
                if dice.random() < 0.2:  # its operator has given it other sizes
                    world.around.segments = dice.randint(2, world.setup.segments)
                world.open()
        else:
            for _ in range(dice.randrange(4)):
                world.life.fibres.step()
        for line in list(world.lines):
            for _ in range(dice.randrange(3)):
                line.up()
            for _ in range(dice.randrange(3)):
                line.down()
        if world.life is not None:
            world.life.turn(dice.randrange(3))
        if dice.random() < 0.2:
            world.tell_exits()
        world.tidy()
        for engine in list(world.engines):
            self._work(engine)

    def _work(self, engine: Engine) -> None:
        world, dice = self._world, self._dice
        for each in engine.workers:
            if dice.random() < 0.5:
                each.map()
        for copy in engine.copies:
            if dice.random() < (0.6 if engine.scheduler.live else 0.05):  # zombies take their time
                world.copy(engine, copy)
        if dice.random() < 0.1:
            for client in engine.clients:
                client.membership.attempt()
        if dice.random() < 0.5:
            world.look_at_spills(engine)
            for request in list(engine.requests):
                world.poll(engine, request)
                if request.phase is Phase.OFFERED and dice.random() < 0.7:
                    world.recall(engine, request)

    # what happens now and then ----------------------------------------------------------------------------------------

    def _engine(self) -> Engine | None:
        return self._dice.choice(self._world.engines) if self._world.engines else None

    def _join(self) -> None:
        if len(self._world.engines) < 3:
            self._world.join(self._dice.randrange(len(self._world.models)))

    def _renew(self) -> None:
        """One engine ends, and another begins whose weights nobody has seen, as each start without weight files is."""
        world = self._world
        if len(world.engines) == 3:
            world.exit(self._dice.choice(world.engines))
        world.renew(self._dice.randrange(len(world.setup.models)))

    def _prompt(self) -> tuple[bytes, int]:
        digests = self._dice.choice(self._world.setup.prompts)
        epoch = EPOCHS[self._dice.random() < 0.15]
        return digests, epoch

    def _ask(self, *, later: bool = False) -> None:
        """`later`: it comes behind all that wait."""
        engine = self._engine()
        if engine is not None and len(engine.requests) < 8:
            digests, epoch = self._prompt()
            blocks = len(digests) // 32
            upto = blocks if self._dice.random() < 0.7 else self._dice.randint(1, blocks)
            order = 10 + self._world.requests if later else self._dice.randrange(10)
            self._world.ask(engine, digests[: 32 * upto], epoch, order)

    def _spill(self) -> None:
        engine = self._engine()
        if engine is not None and len(engine.spills) < 4:
            digests, epoch = self._prompt()
            first = 0 if self._dice.random() < 0.7 else self._dice.randrange(len(digests) // 32)
            self._world.spill(engine, digests, epoch, first)

    def _abort(self) -> None:
        engine = self._engine()
        if engine is not None and engine.requests:
            self._world.release(engine, self._dice.choice(engine.requests))

    def _cut(self) -> None:
        world, dice = self._world, self._dice
        busy = {10 * engine.number for engine in world.engines if engine.copies}
        lines = [line for line in world.lines if line.process // 10 * 10 in busy and dice.random() < 0.7] or world.lines
        if lines:
            world.seen["lost connections"] += 1
            dice.choice(lines).cut()

    def _exit(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._world.seen["exits"] += 1
            self._world.exit(engine)

    def _clear(self) -> None:
        everything = self._dice.random() < 0.3
        kind = -1 if everything else self._dice.randrange(len(self._world.models))
        self._world.clear(kind, self._prompt()[1])

    def _kill(self) -> None:
        self._world.seen["kills"] += self._world.life is not None
        self._world.end_well()

    def _power(self) -> None:
        self._world.seen["power cuts"] += self._world.life is not None
        self._world.end_well(power=True)

    def _stop(self) -> None:
        life = self._world.life
        if life is not None and not life.fibres.hanging and all(files.weather is FAIR for files in life.files):
            self._world.seen["stops"] += 1
            self._world.stop_well()

    # what goes wrong --------------------------------------------------------------------------------------------------

    def _change_weather(self) -> None:
        world, dice = self._world, self._dice
        if world.life is None:
            return
        files = dice.choice(world.life.files)
        often = dice.choice((0.02, 0.3, 1.0))
        operations = dice.choice((EVERYTHING, CHANGES, (dice.choice(EVERYTHING),)))
        match dice.choice(("error", "error", "short", "rot", "lose", "misdirect", "hang")):
            case "error":
                changed = Weather(error=often, code=dice.choice(ERRORS), operations=operations)
            case "hang":
                changed = Weather(hang=often)
                world.life.fibres.halting = 1.0
            case other:
                shares = {other: min(0.3, often)}
                changed = Weather(**shares)  # type: ignore[arg-type]
        files.weather, files.zeros = changed, dice.random() < 0.5
        world.trace("weather", changed)

    def _hang_beside_traffic(self) -> None:
        """Nothing is read any more, and requests come all the time: those whose blocks are in host memory recall them,
        and must keep none of the others waiting."""
        world = self._world
        if world.life is None:
            return
        for files in world.life.files:
            files.weather = Weather(hang=1.0, operations=("read",))
        world.life.fibres.halting = 1.0
        self._traffic_until = world.clock.now() + 4 * TURN_S
        world.seen["hung beside traffic"] += 1

    def _heal(self) -> None:
        self._world.heal()

    def _rot(self) -> None:
        """A few bits of a file are others from now on."""
        world, dice = self._world, self._dice
        inodes = [inode for disk in world.disks for inode in disk.names.values() if inode.data]
        if inodes:
            inode = dice.choice(inodes)
            at = dice.randrange(len(inode.data))
            inode.write(at, bytes([inode.data[at] ^ 1 << dice.randrange(8)]))
            world.seen["rot at rest"] += 1

    def _delete(self) -> None:
        """Somebody tidies up."""
        world, at = self._world, self._dice.randrange(len(self._world.disks))
        disk = world.disks[at]
        if disk.names:
            disk.unlink(self._dice.choice(sorted(disk.names)))
            world.seen["deleted"] += 1
            if world.life is not None:
                world.life.files[at].gone += 1

    def _jump(self) -> None:
        """The machine was suspended, or somebody has set its clock."""
        if self._dice.random() < 0.5:
            self._world.clock.advance(self._dice.choice((0.2, 1.5, 10.0, 400.0)))
        else:
            self._world.around.wall_offset += self._dice.choice((-1e9, -3600.0, -1.0, 1.0, 3600.0, 1e9))

    def _refuse_memory(self) -> None:
        if self._world.life is not None:
            self._world.life.memory.refuse = self._dice.random() < 0.5

    def _take_space(self) -> None:
        disk = self._dice.choice(self._world.disks)
        disk.taken = self._dice.choice((0, disk.total // 2, disk.total))
