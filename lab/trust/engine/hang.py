"""What a disk that hangs costs a real engine's request.

One after the other: a request whose blocks lie on the disk, which hangs from before it comes until it is answered, and
before and after it the same one with a salt that nobody has used, which is a miss at once. What the connector held it
for is in its receipt, and each is judged, less the time that the engine's threads waited for a processor meanwhile. By
how much its first token came later than that of the later miss, which whoever asked has seen, holds the machine's noise
too: its median is judged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from lab.trust.budget import Budget
from lab.trust.engine.prompts import Prompt
from lab.trust.engine.well import TestedWell
from lab.trust.report import Row, ended_by
from stepwell.client.patience import STALL_S
from stepwell.demo.engine import EngineProcess
from stepwell.demo.results.stats import percentile
from stepwell.demo.wire import Answer, Question
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.fuse import FaultyDisk, Rule

LONE = "a hung disk holds a lone request for at most 310 ms"
BESIDE = "a hung disk holds a request beside another one for 310 ms and a step"
PATIENCE_S = 40.0
"""Of one that has asked a healed disk in vain: an open breaker is left for up to 30 s, and then tried by somebody's
recall."""

_LIMIT_S, _SLACK_S = STALL_S + MAX_ALLOWED_S, 0.010
_NOISE_S, _FEWEST = 0.1, 3
_BESIDE = Question([5] * 20, 24)
"""Less than a block: it has nothing to do with the disk."""

_HANG = Rule(op="read", name="*.seg", hang=True)


@dataclass(slots=True)
class Held:
    """One of each a case, in seconds: `held_s` by the connector, and the limit of that; `later_s`: by how much their
    first token came later than that of the misses around them, which came after `miss_s`, for as many tokens as were
    computed. `beyond`: cases over the limit. `broken`: what ended the trial. `waits`: times that nothing came from the
    disk in time."""

    held_s: list[float] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    miss_s: list[float] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    waits: int = 0

    def take(self, hung: Answer, miss_s: float, limit_s: float, queued_s: float) -> None:
        held_s = _receipt(hung)["wait_ms"] / 1e3
        self.held_s.append(held_s)
        self.limits_s.append(limit_s)
        computed = 1 - _receipt(hung)["recalled_tokens"] / hung.prompt_tokens  # what host memory had is recalled
        self.later_s.append(hung.ttft_s - miss_s * computed)
        self.miss_s.append(miss_s)
        if held_s - queued_s > limit_s:
            self.beyond.append(f"held for {_ms(held_s)}, {_ms(queued_s)} without a processor, limit {_ms(limit_s)}")

    def row(self, promise: str, seed: int) -> Row:
        allowed = max(1, len(self.held_s) // 100)  # it is a p99; and two busy processors have moments of their own
        late = self.beyond if len(self.beyond) > allowed else []
        outside = self._outside()
        remark = "no read hung"
        if self.held_s:
            remark = f"judged: what the connector held requests for, p50 {_share(self.held_s, 50)}, "
            remark += f"p99 {_share(self.held_s, 99)}; without waits for a processor {len(self.beyond)} were later, "
            remark += f"which counts beyond {allowed}"
        if self.later_s:
            remark += "; judged too, by its median: first token later than that of misses around it, of "
            remark += f"{len(self.later_s)} pairs p50 {_share(self.later_s, 50)}, p99 {_share(self.later_s, 99)}, "
            remark += f"allowed {_ms(self._allowed_outside_s())}"
        if self.waits:
            remark += f"; nothing came from the healed disk for {PATIENCE_S:g} s, {self.waits} times"
        evidence = [*self.broken, *outside, *late[:5]]
        return Row(promise, len(self.held_s), len(self.broken) + len(outside) + len(late), seed, remark, evidence)

    def _outside(self) -> list[str]:
        """A connector that holds requests and does not know it is seen by whoever waits."""
        if len(self.later_s) < _FEWEST or median(self.later_s) <= self._allowed_outside_s():
            return []
        return [
            f"half of them came {_ms(median(self.later_s))} later than a miss: {[round(s, 3) for s in self.later_s]}"
        ]

    def _allowed_outside_s(self) -> float:
        """Two prefills on a busy machine differ by themselves: by less than one of them, in the median, which is also
        the most that a part of one takes longer than its share."""
        return median(self.limits_s) + max(_NOISE_S, median(self.miss_s))


def rows(engine: EngineProcess, well: TestedWell, prompts: Sequence[Prompt], budget: Budget) -> list[Row]:
    """Raises nothing: what ends it early is a violation, beside what was seen before."""
    disk = well.faulty
    if disk is None:
        return untried(f"could not be tried: {well.why}", budget.seed)
    lone, beside = Held(), Held()
    try:
        _try(engine, disk, prompts, budget, lone, beside)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, and what was counted is told
        lone.broken.append(ended_by(error))
    return [lone.row(LONE, budget.seed), beside.row(BESIDE, budget.seed)]


def untried(why: str, seed: int) -> list[Row]:
    return [Row(promise, 0, 0, seed, why) for promise in (LONE, BESIDE)]


def _try(
    engine: EngineProcess, disk: FaultyDisk, prompts: Sequence[Prompt], budget: Budget, lone: Held, beside: Held
) -> None:
    """Always in the same order: host memory holds less than half of them, so that what comes next is not there."""
    turn = cycle(budget.dice("engine", "hang").sample(prompts, len(prompts)))
    wanted = {LONE: budget.of(10, 1400), BESIDE: budget.of(3, 600)}
    silent = 0
    for number in range(2 * sum(wanted.values())):
        missing = [kind for kind, held in ((LONE, lone), (BESIDE, beside)) if len(held.held_s) < wanted[kind]]
        if budget.over or not missing:
            return
        if not _until_read(engine, turn):
            lone.waits += 1
            silent += 1
            if silent == 2:  # a tier's breaker pauses for 30 s at most
                lone.broken.append(f"nothing came from a healed disk for {2 * PATIENCE_S:g} s")
                return
            continue
        silent = 0
        kind = missing[number % len(missing)]
        tally = lone if kind is LONE else beside
        _pair(engine, disk, next(turn), tally, f"hang {number}", beside=tally is beside)
    if not lone.held_s:
        lone.broken.append("no lone request ever met the hanging disk: nothing was tried")


def _until_read(engine: EngineProcess, turn: Iterator[Prompt]) -> bool:
    """Asks until something came from the disk: it hangs no more, and whoever has left it alone knows that."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        engine.reset_prefix_cache()
        if "disk" in _receipt(engine.ask(list(next(turn).tokens), 1))["tiers"]:
            return True
    return False


def _pair(engine: EngineProcess, disk: FaultyDisk, prompt: Prompt, tally: Held, salt: str, *, beside: bool) -> None:
    def ask(salt: str | None) -> list[Answer]:
        question = Question(list(prompt.tokens), 1, salt, after=4 if beside else 0)
        engine.reset_prefix_cache()
        return engine.ask_all([_BESIDE, question] if beside else [question])

    *_, before = ask(f"{salt}, before")
    queued_s = _queued_s(engine)
    disk.set(_HANG)
    try:
        *others, hung = ask(None)
        hits = sum(disk.report().hits)
    finally:
        disk.heal()
    queued_s = _queued_s(engine) - queued_s
    *_, after = ask(f"{salt}, after")
    if hits:  # else it was still in host memory
        step_s = sum((other.total_s - other.ttft_s) / (_BESIDE.max_tokens - 1) for other in others)
        tally.take(hung, max(before.ttft_s, after.ttft_s), _LIMIT_S + _SLACK_S + step_s, queued_s)


def _queued_s(engine: EngineProcess) -> float:
    """That all threads of the engine have waited for a processor so far: more than the one that decides did."""
    total = 0
    for pid in engine.pids():
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                total += int(path.read_text().split()[1])
    return total / 1e9


def _receipt(answer: Answer) -> dict[str, Any]:
    receipt: dict[str, Any] = (answer.kv_transfer_params or {})["stepwell"]
    return receipt


def _share(seconds: Sequence[float], share: int) -> str:
    return _ms(percentile(seconds, share).value)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
