"""KVDrive's anchor (arXiv 2605.18071): the hits of its step windows, of LRU and of ours, with room for equally many
pages.

Pages that 2-bit scores select are recorded over the steps of real documents; then each residency is replayed on the
same record, at pools of several sizes. KVDrive keeps what the last w steps selected and evicts by the current step's
attention (lookahead); ours is what the policy `stepwell` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lab.bench.longctx import setup
from lab.bench.longctx.anchors.trace import Chosen, Recorder, replay
from lab.bench.longctx.setup import left_out
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.fidelity.prefill import prefill
from stepwell.longctx import TieredCache, attach, policies
from stepwell.longctx.parts.residency.base import ResidencyKind
from stepwell.longctx.parts.residency.lru import LruPages
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.parts.select.topk import TopK

AS_GOOD = Target(">=", 0)
BUDGETS, POOLS = (0.0625, 0.125), (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Shares of the context that a step selects, and pools as multiples of that."""
WINDOWS = tuple(range(1, 9))
TASKS, CONTEXT, STEPS, AFTER = ("kvtable", "nat(80)"), 2048, 72, 8
HOT = 200
LRU, OURS = "LRU", "ours"


@dataclass(frozen=True, slots=True)
class Record:
    """`steps`: every layer of the model is a lane."""

    name: str
    budget: float
    steps: list[Chosen]

    @property
    def selected(self) -> int:
        """Pages of a step."""
        return int(self.steps[AFTER].selected.sum(1).max())


def kinds() -> dict[str, ResidencyKind]:
    ours = policies.STEPWELL.residency
    assert ours is not None
    windows = {f"window {w}": StepWindow(w) for w in WINDOWS}
    return {OURS: ours, LRU: LruPages(), **windows, **{f"window {w}, LRU": StepWindow(w, "lru") for w in WINDOWS}}


def run(stage: Stage) -> Result:
    context, steps, documents = (640, 14, 1) if stage.quick else (CONTEXT, STEPS, 2)
    subject = setup.subject()
    found: list[Record] = []
    for number in range(documents):
        for task in TASKS[: 1 if stage.quick else None]:
            if not stage.over:
                found += _records(subject, task, context, steps, number)
    rows = judged(found)
    for record in found:
        rows += _curve(record)
    return Result("longctx-hits", rows, {"documents": len(found) // len(BUDGETS), "steps": steps}, [
        f"{subject.name}: 16-token pages chosen by 2-bit centred scores, one set for all KV heads, teacher-forced at "
        f"{context} tokens; hits of all {subject.model.config.num_hidden_layers} layers after {AFTER} steps",
    ])  # fmt: skip


@torch.no_grad()
def _records(subject: setup.Subject, task: str, context: int, steps: int, number: int) -> Iterator[Record]:
    model: Any = subject.model
    prompt = prefill(model, [setup.document(subject.text, task, context, number)])
    for budget in BUDGETS:
        recorder = Recorder(TopK(budget))
        policy = replace(
            policies.STEPWELL, selector=recorder, residency=None, prefetch=False, late_mass=None, codec=None
        )
        cache = TieredCache(model.config, policy, hot_tokens=HOT)
        cache.adopt(prompt.dense, prompt.queries)
        with attach(model, policy, hot_tokens=HOT):
            for token in prompt.feed[:steps]:
                model(token[:, None], past_key_values=cache)
        cache.close()
        name = f"{task.partition('(')[0]} {number}"
        yield Record(name, budget, recorder.steps(model.config.num_hidden_layers))


def judged(records: list[Record]) -> list[Row]:
    """The least advantage over LRU and over the best of the windows, of all pools; documents taken together."""
    rows = []
    for budget in BUDGETS:
        of = [record for record in records if record.budget == budget]
        for other, names in (("LRU", [LRU]), ("KVDrive's windows of 1 to 8 steps", [f"window {w}" for w in WINDOWS])):
            what = f"hits, ours less those of {other}: the least of all pools, budget {100 * budget:g} %"
            if not of:
                rows.append(left_out(what, "", AS_GOOD, SKIPPED))
                continue
            ahead = [(_ahead(of, names, pool), pool) for pool in POOLS]
            least, pool = min(ahead, key=lambda pair: pair[0].value)
            rows.append(Row(what, "", least, AS_GOOD, f"with room for {pool:g} x what a step selects"))
    return rows


def _ahead(records: list[Record], others: list[str], pool: float) -> stats.Estimate:
    """Of ours over the best of the others."""
    ours, wanted = _together(records, OURS, pool)
    best = max((_together(records, name, pool)[0] for name in others), key=lambda hits: int(hits.sum()))
    return stats.ratio_of_paired_means(list(zip((ours - best).tolist(), wanted.tolist(), strict=True)))


def _together(records: list[Record], name: str, pool: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Hits and pages that were wanted, of every layer of every document."""
    kind = kinds()[name]
    found = [replay(record.steps, kind, _slots(record, pool), AFTER) for record in records]
    hits, wanted = zip(*found, strict=True)
    return torch.cat(hits), torch.cat(wanted)


def _curve(record: Record) -> Iterator[Row]:
    for pool in POOLS:
        slots = _slots(record, pool)
        found = {name: _together([record], name, pool) for name in kinds()}
        shares = {name: float(hits.sum() / wanted.sum()) for name, (hits, wanted) in found.items()}
        pairs = list(zip(*(each.tolist() for each in found[OURS]), strict=True))
        windows = " ".join(f"{shares[f'window {w}']:.3f}" for w in WINDOWS)
        what = f"  {record.name}, budget {100 * record.budget:g} %, room for {slots} pages ({pool:g} x selected)"
        beside = f"LRU {shares[LRU]:.3f}, windows of 1 to 8 {windows}"
        yield Row(what, "", stats.ratio_of_paired_means(pairs), None, beside, {"pool": pool, **shares})


def _slots(record: Record, pool: float) -> int:
    return int(np.ceil(pool * record.selected))
