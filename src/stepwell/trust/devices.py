"""Disks that fail for real, under a real well process: reads and writes that fail, lie, crawl or hang, files that
change or go. What is promised: right or a miss, in time; nothing is held for ever; warm again when the disk is well.

A client without an engine asks over the socket as an engine does, several requests at a time; blocks are a function of
their identity and are compared bit for bit. A request is overdue when it waited longer than the limits of
docs/design/adr/0009 and SLACK_S for this machine. On a filesystem with faults (FUSE, root); what is done to files
behind the well's back needs neither.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepwell.client.patience import STALL_S, TOTAL_S, UNANSWERED_S
from stepwell.protocol.messages import MOST_ALLOWED_S
from stepwell.testing.caller import Caller, Recalled, prefix
from stepwell.testing.fuse import FaultyDisk, Rule, why_not
from stepwell.testing.well import RealWell, apart, eventually
from stepwell.tiers.disk.recovery import NAME, OURS
from stepwell.trust.budget import Budget
from stepwell.trust.harm import DAMAGE, FAULTS
from stepwell.trust.report import Row

SHARD = 32 << 10
MOST_BLOCKS = 48
LIFE = 12
"""Rounds of one well."""

SLACK_S = 0.5
"""For a busy machine, where a process may wait that long for a processor."""

END_S = 12.0
"""A well that is told to end gives writes 5 s and jobs 2 s; the rest is for the machine."""

ALLOWED_S, BUSY_S = STALL_S + MOST_ALLOWED_S, 0.01
_KNOWN = 40
_MOST_EVIDENCE = 5


@dataclass
class Tally:
    """Of one promise."""

    cases: int = 0
    violations: int = 0
    requests: int = 0
    worst_s: float = 0.0
    evidence: list[str] = field(default_factory=list)

    def broken(self, what: str, times: int = 1) -> None:
        self.violations += times
        if len(self.evidence) < _MOST_EVIDENCE:
            self.evidence.append(what)

    def row(self, promise: str, seed: int, remark: str) -> Row:
        return Row(promise, self.cases, self.violations, seed, remark, self.evidence)


@dataclass
class Stage:
    """A well over a disk, and who asks it. `below`: where its files really are. `known`: prefixes it may have."""

    well: RealWell
    caller: Caller
    below: Path
    disk: FaultyDisk | None
    known: list[bytes] = field(default_factory=list)

    def heal(self) -> None:
        if self.disk is not None:
            self.disk.heal()


@contextmanager
def staged(seed: int, *, faulty: bool) -> Iterator[Stage]:
    with ExitStack() as held:
        folder = held.enter_context(apart())
        below = folder / "below"
        below.mkdir()
        disk = held.enter_context(FaultyDisk(below, seed)) if faulty else None
        place = (disk.path if disk else below) / "kv"
        wishes = {"host": "64MiB", "disk": f"{place}:96MiB", "disk_reserve": "1MiB"}
        well = held.enter_context(RealWell(folder / "home", **wishes))
        caller = held.enter_context(Caller(well.home, SHARD))
        stage = Stage(well, caller, below / "kv", disk)
        held.callback(stage.heal)  # before the well is stopped
        yield stage


def run(budget: Budget) -> Iterable[Row]:
    rounds = budget.of(ci=96, full=6000)
    why = why_not()
    faults = _Rounds(budget, [*FAULTS, *DAMAGE] if not why else [*DAMAGE])
    faults.all(rounds)
    yield from faults.rows(why)
    yield _lone(budget, budget.of(ci=100, full=1000), why)


class _Rounds:
    """Rounds of harm: each on a well that has seen some, in an order that the dice say."""

    def __init__(self, budget: Budget, kinds: Sequence[str]) -> None:
        self._budget = budget
        self._kinds = kinds
        self._tallies = {kind: Tally() for kind in kinds}
        self._held, self._warm, self._ended, self._files = Tally(), Tally(), Tally(), Tally()

    def all(self, rounds: int) -> None:
        order = [self._kinds[n % len(self._kinds)] for n in range(rounds)]
        self._budget.dice("devices", "order").shuffle(order)
        for first in range(0, rounds, LIFE):
            if self._budget.over:
                return
            self._budget.tell(f"round {first} of {rounds}")
            dice = self._budget.dice("devices", first)
            with staged(dice.randrange(1 << 32), faulty=any(kind in FAULTS for kind in self._kinds)) as stage:
                for number, kind in enumerate(order[first : first + LIFE], first):
                    self._round(stage, kind, number, dice)
                self._life_ends(stage, first, dice)

    # one round --------------------------------------------------------------------------------------------------------

    def _round(self, stage: Stage, kind: str, number: int, dice: random.Random) -> None:
        """Traffic, the harm at some moment, more traffic, the end of it, more traffic."""
        tally, where = self._tallies[kind], f"round {number}"
        try:
            self._traffic(stage, tally, where, dice)
            if dice.random() < 0.5:
                eventually(stage.well.written, "all is written")
            if dice.random() < 0.7:
                stage.well.forget_host()
            self._harm(stage, kind, dice)
            for _ in range(dice.randint(1, 3)):
                self._traffic(stage, tally, where, dice)
                if dice.random() < 0.3:
                    stage.well.forget_host()
            stage.heal()
            self._traffic(stage, tally, where, dice)
            if dice.random() < 0.3:
                self._comes_back(stage, where, dice)
        except Exception as error:  # noqa: BLE001 - whatever it is: a request failed, and that is what is counted
            tally.broken(f"{where}: {error!r}")
            stage.heal()

    @staticmethod
    def _harm(stage: Stage, kind: str, dice: random.Random) -> None:
        if kind in FAULTS:
            assert stage.disk is not None
            stage.disk.set(*FAULTS[kind](dice))
            return
        segments = sorted(stage.below.glob("*.seg"))
        for segment in dice.sample(segments, min(len(segments), dice.randint(1, 3))):
            DAMAGE[kind](segment, dice)

    def _traffic(self, stage: Stage, tally: Tally, where: str, dice: random.Random) -> None:
        """Requests for known prefixes and new ones, some at a time; what was not recalled is computed and spilled."""
        asked = [self._draw(stage, dice) for _ in range(dice.choice((1, 1, 2, 5)))]
        for digests, got in zip(asked, stage.caller.recall_many(asked), strict=True):
            self._judge(tally, where, got, len(asked))
            stage.caller.spill(digests)

    @staticmethod
    def _draw(stage: Stage, dice: random.Random) -> bytes:
        if stage.known and dice.random() < 0.7:
            return dice.choice(stage.known)
        new = prefix(dice, dice.randint(1, MOST_BLOCKS))
        stage.known = [*stage.known[1 - _KNOWN :], new]
        return new

    @staticmethod
    def _judge(tally: Tally, where: str, got: Recalled, beside: int) -> None:
        """Who waits in line begins to wait anew when one before it was served."""
        tally.requests += 1
        tally.cases += got.compared
        tally.worst_s = max(tally.worst_s, got.wait_s)
        if got.wrong:
            tally.broken(f"{where}: blocks {got.wrong} of {got.asked} are wrong", len(got.wrong))
        nothing = not got.blocks and beside == 1
        limit_s = ALLOWED_S + UNANSWERED_S if nothing else beside * TOTAL_S
        if got.wait_s > limit_s + SLACK_S:
            tally.broken(f"{where}: a request waited {got.wait_s:.3f} s, of {limit_s:g} allowed")

    # what must hold afterwards ----------------------------------------------------------------------------------------

    def _comes_back(self, stage: Stage, where: str, dice: random.Random) -> None:
        """What is spilled from now on is recalled from disk, by itself."""
        self._warm.cases += 1

        def warm() -> bool:
            new = prefix(dice, 8)
            stage.caller.spill(new)
            eventually(stage.well.written, "all is written")
            stage.well.forget_host()
            return stage.caller.recall(new).compared == 8

        try:
            eventually(warm, "what is spilled now is recalled from disk", 60.0)
        except TimeoutError as error:
            self._warm.broken(f"{where}: {error}")

    def _life_ends(self, stage: Stage, first: int, dice: random.Random) -> None:
        """Nothing is held; then the well is told to end, sometimes while it hangs, and leaves what it should."""
        where = f"rounds from {first}"
        self._comes_back(stage, where, dice)
        self._held.cases += 1
        try:
            eventually(lambda: not stage.well.held(), "nothing is held", 10.0)
        except TimeoutError:
            self._held.broken(f"{where}: held for nobody: {stage.well.held()}")
        hangs = stage.disk is not None and dice.random() < 0.3
        if hangs and stage.disk is not None:
            stage.disk.set(Rule(op=dice.choice(("read", "write")), hang=True))
            stage.well.forget_host()
            stage.caller.recall_many(stage.known[:3])
            stage.caller.spill(prefix(dice, MOST_BLOCKS))
        self._ended.cases += 1
        began = time.monotonic()
        stage.well.signal(signal.SIGTERM)
        try:
            eventually(lambda: not stage.well.alive, "it ends", 2 * END_S)
        except TimeoutError:
            stage.heal()
        seconds = time.monotonic() - began
        self._ended.worst_s = max(self._ended.worst_s, seconds)
        if seconds > END_S:
            self._ended.broken(f"{where}: it ended after {seconds:.1f} s")
        stage.heal()
        left = [path.name for path in stage.below.iterdir() if not NAME.fullmatch(path.name) and path.name not in OURS]
        home = {path.name for path in stage.well.home.iterdir()}
        left += sorted(home - {"keyring", "stepwell.log", "disks.json", "README.txt"})
        self._files.cases += 1
        if left:
            self._files.broken(f"{where}: left behind: {left}")

    def rows(self, why: str) -> Iterator[Row]:
        seed = self._budget.seed
        for kind in (*FAULTS, *DAMAGE):
            if kind not in self._tallies:
                yield Row(f"{kind}: right or a miss, in time", 0, 0, seed, f"not tried: {why}")
                continue
            tally = self._tallies[kind]
            remark = f"blocks compared, of {tally.requests} requests; the longest waited {tally.worst_s:.2f} s"
            yield tally.row(f"{kind}: right or a miss, in time", seed, remark)
        yield self._warm.row("warm again when the disk is well", seed, "times asked, within 60 s")
        yield self._held.row("no lease, pin or slot is held for ever", seed, "wells, each after its rounds")
        worst = self._ended.worst_s
        yield self._ended.row(
            "a well ends when told, whatever hangs", seed, f"the longest took {worst:.1f} s, of {END_S:g}"
        )
        yield self._files.row("a well leaves only its own files", seed, "homes and directories of the disk tier")


# --- one request beside a disk that hangs -----------------------------------------------------------------------------


def _lone(budget: Budget, samples: int, why: str) -> Row:
    """How much longer a request takes because the disk under it hangs, one request at a time."""
    promise = "a hung disk adds its limit and at most 10 ms to a lone request"
    if why:
        return Row(promise, 0, 0, budget.seed, f"not tried: {why}")
    waits: list[float] = []
    dice = budget.dice("devices", "lone")
    with staged(dice.randrange(1 << 32), faulty=True) as stage:
        assert stage.disk is not None
        digests = prefix(dice, 16)
        stage.caller.spill(digests)
        eventually(stage.well.written, "all is written")
        while len(waits) < samples and not budget.over:
            stage.well.forget_host()
            stage.disk.set(Rule(op="read", name="*.seg", hang=True))
            waits.append(stage.caller.recall(digests).wait_s)
            stage.disk.heal()
            stage.caller.recall_all(digests)
    late = sum(wait > ALLOWED_S + BUSY_S for wait in waits)
    p50, p99 = (1000 * float(np.percentile(waits, p)) for p in (50, 99)) if waits else (0.0, 0.0)
    load = Path("/proc/loadavg").read_text().split()[0]
    remark = f"limit {1000 * ALLOWED_S:.0f} ms; p50 {p50:.1f} ms, p99 {p99:.1f} ms, {late} above; load {load}"
    broken = late if late > len(waits) / 100 else 0
    return Row(promise, len(waits), broken, budget.seed, remark)
