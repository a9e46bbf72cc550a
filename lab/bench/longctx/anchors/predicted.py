"""ScoutAttention's anchor (arXiv 2603.27138): what attending with a predicted query costs in accuracy.

Scout attends over what lies in host memory with the query that the layer before foretells, so that it can begin early.
We foretell, too, but only to fetch early. Four ways, at equally many selected pages, on the fidelity suite's tables:
the predicted query selects and attends (Scout's); the predicted one fetches early, the actual one attends, and nobody
waits for what was not foretold (ours, which overlaps as much: this is judged); the predicted one selects, and the
actual one attends; the actual one does both, and everybody waits for it. What was measured is kept in parts, and a
later run goes on from there, as in `verified`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.bench.longctx import setup
from lab.bench.longctx.parts import Numbers, Parts
from lab.bench.longctx.setup import left_out
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.fidelity.prefill import prefill
from stepwell.fidelity.results import bootstrap
from stepwell.fidelity.results.metrics import compare
from stepwell.fidelity.results.rows import DIGITS
from stepwell.fidelity.runner import Tiered
from stepwell.longctx import policies
from stepwell.longctx.parts.index.rotated import RotatedKeys
from stepwell.longctx.parts.select.topk import TopK
from stepwell.longctx.policy import Policy

BETTER = Target(">=", 2.0)
TASK, CONTEXT, DOCUMENTS, BUDGET, HOT_SHARE = "kvtable", 2048, 13, 0.125, 0.25
"""80 digits a document: more than a thousand."""
SCOUT, OURS = "predicted query selects and attends", "it fetches early, the actual one attends, none waits"
SELECTS, ACTUAL = "it selects, the actual one attends", "actual query, waited for"


def ways() -> dict[str, Policy]:
    """With our index and pages in all of them, so that nothing differs but the query."""
    scout = replace(policies.named("scout"), index=RotatedKeys(2), selector=TopK(BUDGET), page_tokens=16)
    return {
        SCOUT: scout,
        SELECTS: replace(scout, predicted_math=False),
        OURS: replace(scout, predicted_math=False, query="actual", executor="fetch", prefetch=True, late_mass=1.0),
        ACTUAL: replace(scout, predicted_math=False, query="actual"),
    }


def run(stage: Stage) -> Result:
    context, count, task = (640, 1, "kvtable(3)") if stage.quick else (CONTEXT, DOCUMENTS, TASK)
    subject = setup.subject()
    parts = Parts.open(stage.kept, "longctx-predicted", f"{task} {context} {BUDGET} {setup.SEED} {subject.name}")
    for number in range(count):
        if (name := f"document {number}") not in parts and parts.time_for("document", stage):
            parts.add(name, _measured(subject, task, context, number), stage)
    found = [numbers for _, numbers in parts.items()]
    left = count - len(found)
    told = f"; {left} documents are left: run it again, it goes on" if left else ""
    digits = int(sum(each["digits"] for each in found))
    counts = {"documents": len(found), "digits": digits, "documents_left": left}
    return Result("longctx-predicted", rows(found), counts, [
        f"{subject.name}: {task} at {context} tokens, teacher-forced, 2-bit centred scores, pages of 16, "
        f"{100 * BUDGET:g} % selected, all but ours attended in place, prediction from layer 3 on{told}",
    ])  # fmt: skip


def _measured(subject: setup.Subject, task: str, context: int, number: int) -> Numbers:
    made = setup.document(subject.text, task, context, number)
    prompt = prefill(subject.model, [made])
    found: Numbers = {"digits": len(made.gold_positions()), "steps": len(made.continuation)}
    for name, policy in ways().items():
        # On a CPU pages are fetched early from disk only.
        outcome = Tiered(subject.model, policy, "disk" if policy.prefetch else "host", HOT_SHARE).run(prompt)
        told: Any = compare(made, prompt.logits[0], outcome.logits[0])
        found[f"right, {name}"] = float(told.right[list(told.gold)].sum())
        found[f"KL, {name}"] = float(told.kl.sum())
        found[f"selected, {name}"] = outcome.moved.selected_share
        found["right, full attention"] = float(told.full_right[list(told.gold)].sum())
    return found


def rows(found: list[Mapping[str, float]] | list[Numbers]) -> list[Row]:
    """Points are hundredths of the digits. Documents are resampled."""
    what = "field accuracy, ours less attending with the predicted query, nothing waited for in both"
    if not found:
        return [left_out(what, "points", BETTER, SKIPPED)]
    digits, steps = ([each[name] for each in found] for name in ("digits", "steps"))

    def right(name: str) -> tuple[list[float], list[float]]:
        return [each[f"right, {name}"] for each in found], digits

    gained = bootstrap.difference(right(OURS), right(SCOUT)).times(100)
    waited = bootstrap.difference(right(ACTUAL), right(SCOUT)).times(100)
    by_math = bootstrap.difference(right(SELECTS), right(SCOUT)).times(100)
    counted = f"{sum(digits):.0f} digits"
    few = sum(digits) < DIGITS
    told = [
        left_out(what, "points", BETTER, f"{counted} judge no point")
        if few
        else Row(what, "points", gained, BETTER, counted),
        *([Row("  so far", "points", gained, None, counted)] if few else []),
        Row("  the actual query's, waited for, less that", "points", waited),
        Row("  by the mathematics alone, same selection", "points", by_math),
        Row("  field accuracy, full attention", "", bootstrap.ratio(*right("full attention"))),
    ]
    for name in (OURS, ACTUAL, SELECTS, SCOUT):
        selected = sum(each[f"selected, {name}"] for each in found) / len(found)
        beside = f"{100 * selected:.1f} % of the context selected"
        told.append(Row(f"  field accuracy, {name}", "", bootstrap.ratio(*right(name)), None, beside))
        told.append(Row(f"  mean KL, {name}", "nat", bootstrap.ratio([each[f"KL, {name}"] for each in found], steps)))
    return told
