"""What a disk that hangs costs a real engine's request.

Pairs in turn: a request whose blocks lie on the disk, which hangs from before it comes until it is answered, and the
same one with a salt that nobody has used, which is a miss at once. Both compute everything. What the connector held the
first one for is in its receipt; the difference of their times to first token holds the machine's noise too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.bench.stats import percentile
from stepwell.client.patience import STALL_S
from stepwell.demo.engine import Engine
from stepwell.demo.wire import Answer, Question
from stepwell.protocol.messages import MOST_ALLOWED_S
from stepwell.testing.fuse import FaultyDisk, Rule
from stepwell.trust.budget import Budget
from stepwell.trust.engine.prompts import Prompt
from stepwell.trust.engine.well import TestedWell
from stepwell.trust.report import Row

LONE = "a hung disk holds a lone request for at most 310 ms"
BESIDE = "a hung disk holds a request beside another one for 310 ms and a step"
_LIMIT_S, _SLACK_S = STALL_S + MOST_ALLOWED_S, 0.010
_BESIDE = Question([5] * 20, 24)
"""Less than a block: it has nothing to do with the disk."""

_HANG = Rule(op="read", name="*.seg", hang=True)


@dataclass(slots=True)
class Held:
    """Seconds, one of each a case: that the connector held requests for, and by how much their first token came later
    than that of the miss beside them. `beyond`: cases over the limit."""

    held_s: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)

    def take(self, hung: Answer, missed: Answer, limit_s: float) -> None:
        held_s = _receipt(hung)["wait_ms"] / 1e3
        self.held_s.append(held_s)
        if not _receipt(hung)["recalled_tokens"]:
            self.later_s.append(hung.ttft_s - missed.ttft_s)
        if held_s > limit_s:
            self.beyond.append(f"held for {1e3 * held_s:.0f} ms, limit {1e3 * limit_s:.0f} ms")

    def row(self, promise: str, seed: int) -> Row:
        remark = "no read hung"
        if self.held_s:
            remark = f"held p50 {_ms(self.held_s, 50)}, p99 {_ms(self.held_s, 99)}"
        if self.later_s:
            remark += f"; first token later than that of a miss beside it: p50 {_ms(self.later_s, 50)}, "
            remark += f"p99 {_ms(self.later_s, 99)}, of {len(self.later_s)} pairs"
        allowed = max(1, len(self.held_s) // 100)  # it is a p99; and two busy processors have moments of their own
        late = len(self.beyond) if len(self.beyond) > allowed else 0
        remark += f"; {len(self.beyond)} were later, which counts beyond {allowed}" if self.held_s else ""
        return Row(promise, len(self.held_s), late, seed, remark, self.beyond[:5] if late else [])


def rows(engine: Engine, well: TestedWell, prompts: Sequence[Prompt], budget: Budget) -> list[Row]:
    """Raises EngineFailed."""
    disk = well.faulty
    if disk is None:
        return [Row(promise, 0, 0, budget.seed, f"could not be tried: {well.why}") for promise in (LONE, BESIDE)]
    lone, beside = Held(), Held()
    for number in range(budget.of(9, 2000)):
        if budget.over:
            break
        at = number % len(prompts)
        _until_read(engine, [*prompts[at + 1 :], *prompts[:at]])
        tally = beside if number % 3 == 2 else lone
        _pair(engine, disk, prompts[at], tally, f"hang {number}", beside=tally is beside)
    return [lone.row(LONE, budget.seed), beside.row(BESIDE, budget.seed)]


def _until_read(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Asks until something came from the disk: it hangs no more, and whoever has left it alone knows that."""
    for prompt in prompts:
        engine.reset_prefix_cache()
        if "disk" in _receipt(engine.ask(list(prompt.tokens), 1))["tiers"]:
            return


def _pair(engine: Engine, disk: FaultyDisk, prompt: Prompt, tally: Held, salt: str, *, beside: bool) -> None:
    answers: dict[bool, Answer] = {}
    hits, step_s = 0, 0.0
    for hangs in (False, True):
        question = Question(list(prompt.tokens), 1, None if hangs else salt, after=4 if beside else 0)
        engine.reset_prefix_cache()
        if hangs:
            disk.set(_HANG)
        *others, answers[hangs] = engine.ask_all([_BESIDE, question] if beside else [question])
        if hangs:
            hits = sum(disk.report().hits)
            disk.heal()
            step_s = sum((other.total_s - other.ttft_s) / (_BESIDE.max_tokens - 1) for other in others)
    if hits:  # else it was still in host memory
        tally.take(answers[True], answers[False], _LIMIT_S + _SLACK_S + step_s)


def _receipt(answer: Answer) -> dict[str, Any]:
    receipt: dict[str, Any] = (answer.kv_transfer_params or {})["stepwell"]
    return receipt


def _ms(seconds: Sequence[float], share: int) -> str:
    return f"{1e3 * percentile(seconds, share).value:.0f} ms"
