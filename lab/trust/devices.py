"""Disks that fail for real, under a real well process: reads and writes that fail, lie, crawl or hang, files that
change or go. What is promised: right or a miss, in time; nothing is held for ever; warm again when the disk is well.

A client without an engine asks over the socket as an engine does, several requests at a time; blocks are a function of
their identity and are compared bit for bit. A request is overdue when it waited longer than the limits of
docs/design/adr/0009 and SLACK_S for this machine. On a filesystem with faults (FUSE, root); what is done to files
behind the well's back needs neither.

A block is a case of a kind of harm if it was compared in a round of it after that had taken effect for the first time:
a request to the disk met a fault, a file was changed behind the well's back, a real filesystem refused the well
something. All others are judged too, and are nobody's cases.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from lab.rig.caller import Recalled, prefix
from lab.rig.well import eventually
from lab.trust.budget import Budget
from lab.trust.disks.harm import DAMAGE, FAULTS, REAL
from lab.trust.disks.hung import lone
from lab.trust.disks.stages import Stage, Tally, staged
from lab.trust.report import Row
from stepwell.client.patience import STALL_S, TOTAL_S, UNANSWERED_S
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.fuse import Rule, why_not
from stepwell.testing.mounts import why_no_mounts
from stepwell.tiers.disk.recovery import NAME, OURS

MOST_BLOCKS = 48
EXT4 = "ext4"
LIFE = 12
"""Rounds of one well."""

MOST_STEPS = 24
"""Of requests in a round: it goes on until the harm has come, if it comes by then."""

SLACK_S = 0.5
"""For a busy machine, where a process may wait that long for a processor."""

END_S = 12.0
"""A well that is told to end gives writes 5 s and jobs 2 s; the rest is for the machine."""

WARM_S = 90.0
"""A disk that is well again is tried after pauses of up to 30 s, for reads and for writes, one after the other."""

NOTHING_S = STALL_S + MAX_ALLOWED_S + UNANSWERED_S
"""The longest that a lone request waits of which no block comes."""

_KNOWN = 40


def run(budget: Budget) -> Iterable[Row]:
    rounds = _Rounds(budget)
    missing: dict[str, str] = {}
    if why := why_not():
        missing |= dict.fromkeys(FAULTS, why)
        rounds.all([*DAMAGE], budget.of(ci=40, full=2000))
    else:
        rounds.all([*FAULTS, *DAMAGE], budget.of(ci=48, full=4000), faulty=True)
    if why := why_no_mounts(EXT4):
        missing |= dict.fromkeys(REAL, why)
    else:
        rounds.all([*REAL], budget.of(ci=8, full=400), kind=EXT4)
    yield from rounds.rows(missing)
    yield lone(budget, budget.of(ci=100, full=1000))


def _errors(stage: Stage) -> int:
    """That the well's disk has had."""
    return sum(int(value) for name, value in stage.well.stats().items() if name.startswith("disk_errors_"))


class _Rounds:
    """Rounds of harm: each on a well that has seen some, in an order that the dice say."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._tallies = {kind: Tally() for kind in (*FAULTS, *DAMAGE, *REAL)}
        self._held, self._warm, self._ended, self._files = Tally(), Tally(), Tally(), Tally()

    def all(self, kinds: Sequence[str], rounds: int, *, faulty: bool = False, kind: str = "") -> None:
        order = [kinds[n % len(kinds)] for n in range(rounds)]
        self._budget.dice("devices", kind, "order").shuffle(order)
        for first in range(0, rounds, LIFE):
            if self._budget.over:
                return
            self._budget.tell(f"round {first} of {rounds} {kind}")
            dice = self._budget.dice("devices", kind, first)
            with staged(dice.randrange(1 << 32), faulty=faulty, kind=kind) as stage:
                for number, harm in enumerate(order[first : first + LIFE], first):
                    self._round(stage, harm, f"round {kind}{number}", dice)
                self._life_ends(stage, f"rounds from {kind}{first}", dice)

    # one round --------------------------------------------------------------------------------------------------------

    def _round(self, stage: Stage, kind: str, where: str, dice: random.Random) -> None:
        """Traffic, the harm at some moment, more traffic, the end of it, more traffic."""
        tally = self._tallies[kind]
        tally.rounds += 1
        try:
            self._traffic(stage, tally, where, dice, lambda: False)
            if dice.random() < 0.5:
                eventually(stage.well.written, "all is written")
            if dice.random() < 0.9:
                stage.well.forget_host()
            before = _errors(stage)
            came = self._harm(stage, kind, dice)
            steps = dice.randint(2, 8)
            for step in range(MOST_STEPS):
                if step >= steps and (came or kind in DAMAGE):
                    break
                has_come = partial(self._has_come, stage, kind, before, already=came)
                came = self._traffic(stage, tally, where, dice, has_come)
                if dice.random() < 0.5:
                    stage.well.forget_host()
            tally.hits += came
            stage.heal()
            self._traffic(stage, tally, where, dice, lambda: came)
            if dice.random() < 0.3:
                self._comes_back(stage, where, dice)
        except Exception as error:  # noqa: BLE001 - whatever it is: a request failed, and that is what is counted
            tally.broken(f"{where}: {error!r}")
            stage.heal()

    @staticmethod
    def _harm(stage: Stage, kind: str, dice: random.Random) -> bool:
        """True: it has taken effect already."""
        changed = False
        if kind in FAULTS:
            assert stage.disk is not None
            stage.disk.set(*FAULTS[kind](dice))
        elif kind in REAL:
            REAL[kind](stage)
        else:
            segments = sorted(stage.below.glob("*.seg"))
            for segment in dice.sample(segments, min(len(segments), dice.randint(1, 3))):
                with contextlib.suppress(FileNotFoundError):
                    changed |= DAMAGE[kind](segment, dice)
        return changed

    @staticmethod
    def _has_come(stage: Stage, kind: str, before: int, *, already: bool) -> bool:
        """The harm that was done to the disk has been met by now. `before`: the errors of the well's disk."""
        if already:
            return True
        if kind in FAULTS:
            return stage.disk is not None and sum(stage.disk.report().hits) > 0
        return kind in REAL and _errors(stage) > before

    def _traffic(
        self, stage: Stage, tally: Tally, where: str, dice: random.Random, has_come: Callable[[], bool]
    ) -> bool:
        """Requests for known prefixes and new ones, some at a time; what was not recalled is computed and spilled.
        True: the harm had come when they were answered."""
        asked = [self._draw(stage, dice) for _ in range(dice.choice((1, 1, 2, 5)))]
        answers = stage.caller.recall_many(asked)
        came = has_come()
        for digests, got in zip(asked, answers, strict=True):
            self._judge(tally, where, got, len(asked), came=came)
            stage.caller.spill(digests)
        return came

    @staticmethod
    def _draw(stage: Stage, dice: random.Random) -> bytes:
        if stage.known and dice.random() < 0.7:
            return dice.choice(stage.known)
        new = prefix(dice, dice.randint(1, MOST_BLOCKS))
        stage.known = [*stage.known[1 - _KNOWN :], new]
        return new

    @staticmethod
    def _judge(tally: Tally, where: str, got: Recalled, beside: int, *, came: bool) -> None:
        """Who waits in line begins to wait anew when one before it was served."""
        if came:
            tally.requests += 1
            tally.cases += got.compared
            tally.staged += got.staged
        tally.worst_s = max(tally.worst_s, got.wait_s)
        if got.wrong:
            tally.broken(f"{where}: blocks {got.wrong} of {got.asked} are wrong", len(got.wrong))
        nothing = not got.blocks and beside == 1
        limit_s = NOTHING_S if nothing else beside * TOTAL_S
        if got.wait_s > limit_s + SLACK_S:
            tally.broken(f"{where}: a request waited {got.wait_s:.3f} s, of {limit_s:g} allowed")

    # what must hold afterwards ----------------------------------------------------------------------------------------

    def _comes_back(self, stage: Stage, where: str, dice: random.Random) -> None:
        """What is spilled from now on is recalled from disk, by itself."""
        self._warm.cases += 1

        def warm() -> bool:
            new = prefix(dice, 8)
            stage.caller.spill(new)
            eventually(stage.well.written, "all is written", WARM_S)
            stage.well.forget_host()
            return stage.caller.recall(new).compared == 8

        began = time.monotonic()
        try:
            eventually(warm, "what is spilled now is recalled from disk", WARM_S)
            self._warm.worst_s = max(self._warm.worst_s, time.monotonic() - began)
        except TimeoutError as error:
            self._warm.broken(f"{where}: {error}")

    def _life_ends(self, stage: Stage, where: str, dice: random.Random) -> None:
        """Nothing is held; then the well is told to end, sometimes while it hangs, and leaves what it should."""
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
        left += sorted(home - {"keyring", "stepwell.log", "disks.json", "README.txt", "well.lock"})
        self._files.cases += 1
        if left:
            self._files.broken(f"{where}: left behind: {left}")

    def rows(self, missing: Mapping[str, str]) -> Iterator[Row]:
        """`missing`: kinds that could not be tried, and why."""
        seed = self._budget.seed
        for kind, tally in self._tallies.items():
            remark = f"it never came, in {tally.rounds} rounds"
            if tally.hits:
                remark = (
                    f"blocks compared from its coming on, {tally.staged:,} of them from disk, of {tally.requests:,} "
                    f"requests; it came in {tally.hits} of {tally.rounds} rounds; the longest waited "
                    f"{tally.worst_s:.2f} s"
                )
            promise = f"{kind}: right or a miss, in time"
            yield tally.row(promise, seed, f"not tried: {missing[kind]}" if kind in missing else remark)
        warm = f"times asked; the longest took {self._warm.worst_s:.1f} s, of {WARM_S:g}"
        yield self._warm.row("warm again when the disk is well", seed, warm)
        yield self._held.row("no lease, pin or slot is held for ever", seed, "wells, each after its rounds")
        took = f"wells; the longest took {self._ended.worst_s:.1f} s, of {END_S:g}"
        yield self._ended.row("a well ends when told, whatever hangs", seed, took)
        yield self._files.row("a well leaves only its own files", seed, "homes and directories of the disk tier")
