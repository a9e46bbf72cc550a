"""Runs all combinations of tasks, lengths, documents, budgets and policies. Each document is prefilled once, exactly,
for all; documents of one length are then decoded side by side, each as a row of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from stepwell.fidelity import tasks
from stepwell.fidelity.document import Document
from stepwell.fidelity.options import FULL, ORACLE, Config
from stepwell.fidelity.prefill import Prefilled, prefill
from stepwell.fidelity.results.metrics import compare
from stepwell.fidelity.results.rows import FidelityPoint, FidelityRow, Measured, row
from stepwell.fidelity.runner import Full, Runner, Tier, Tiered, granularity, is_exact, policy_of
from stepwell.fidelity.tasks.own import Own
from stepwell.fidelity.text import Text

Say = Callable[[str], None]
SIDE_BY_SIDE_TOKENS = 16 << 10
"""Prompt tokens in one batch: their memory, some times over, is modest beside a model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs to do. `documents`: number for each of `seeds`, task and length; `own`: documents beside those or
    instead. `limit_s`: no batch begins that would end later if it took as long as the longest so far; one always
    runs."""

    configs: Sequence[Config]
    tasks: Sequence[str] = ()
    lengths: Sequence[int] = ()
    budgets: Sequence[float] = (0.125,)
    documents: int = 5
    seeds: int = 3
    own: Sequence[Own] = ()
    tier: Tier = "host"
    hot_share: float = 0.25
    disk: Path | None = None
    audit: bool = False
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class MatrixJob:
    """Documents to run side by side, and the names of their rows. `tokens` and `intensity`: 0 where each has its
    own."""

    task: str
    tokens: int
    intensity: int
    blind: bool
    documents: Sequence[Document]


def run(model: Any, text: Text, plan: Plan, say: Say = lambda line: None) -> list[FidelityRow]:
    """The rows, in the order of the plan. Raises ConfigError for tasks or policies that cannot be."""
    for name in plan.tasks:
        tasks.named(name)  # raises for a wrong name at once
    for config, budget in product(plan.configs, plan.budgets):
        if config.name != FULL:
            policy_of(config, budget)
    began = time.monotonic()
    found: dict[FidelityPoint, list[Measured]] = {}
    longest = 0.0
    for job in _jobs(text, plan):
        at = time.monotonic()
        if plan.limit_s is not None and found and at - began + longest > plan.limit_s:
            say(f"stopped: what comes next may not end within {plan.limit_s:.0f} s")
            break
        prefilled = prefill(model, job.documents)
        say(
            f"{job.task}, {len(job.documents)} documents of {job.documents[0].tokens} tokens: {len(prefilled.feed)} "
            f"steps; prefilled in {time.monotonic() - at:.1f} s"
        )
        for point, measured in _policies(model, plan, job, prefilled, say):
            found.setdefault(point, []).append(measured)
        longest = max(longest, time.monotonic() - at)
    return [row(point, measured, plan.seeds) for point, measured in found.items()]


def _jobs(text: Text, plan: Plan) -> Iterator[MatrixJob]:
    """Jobs, some documents of every task and length first, so that an interrupted run has something of each."""
    for own in plan.own:
        yield MatrixJob(own.task, 0, 0, False, [own.document])
    wanted = list(product(range(plan.documents), range(plan.seeds)))
    for first in range(0, len(wanted), plan.documents):
        for tokens, name in product(plan.lengths, plan.tasks):
            made = [
                tasks.document(name, text, tokens, seed, number)
                for number, seed in wanted[first : first + plan.documents]
            ]
            size = max(1, SIDE_BY_SIDE_TOKENS // tokens)
            for at in range(0, len(made), size):
                some, blind = made[at : at + size], tasks.named(name).blind
                yield MatrixJob(tasks.base_name(name), tokens, some[0].intensity, blind, some)


def _policies(
    model: Any, plan: Plan, job: MatrixJob, prefilled: Prefilled, say: Say
) -> Iterator[tuple[FidelityPoint, Measured]]:
    """Full attention once, then every budget; those with a machine of their own first, whose bytes others match."""

    def one(config: Config, runner: Runner, of: str, budget: float) -> tuple[FidelityPoint, Measured]:
        began = time.monotonic()
        outcome = runner.run(prefilled)
        seconds = time.monotonic() - began
        each = zip(prefilled.documents, prefilled.logits, outcome.logits, strict=True)
        compared = [compare(document, full, logits) for document, full, logits in each]
        point = FidelityPoint(job.task, config.name, plan.tier, of, budget, job.tokens, job.intensity, job.blind)
        kl = sum(float(one.kl.mean()) for one in compared) / len(compared)
        cold = "" if outcome.moved.bytes_all_fp16 else "; nothing was cold: all of it fits into the hot tokens"
        say(f"  {config.name} at {budget:.2%}, {of}: KL {kl:.4f}, {seconds:.1f} s{cold}")
        return point, Measured(prefilled.documents[0].tokens, compared, outcome.moved, seconds)

    def tiered(policy: Any) -> Runner:
        return Tiered(model, policy, plan.tier, plan.hot_share, plan.disk, plan.audit)

    ordered = sorted(plan.configs, key=lambda config: config.control)
    sparse = []
    for config in ordered:
        if config.name == FULL:
            yield one(config, Full(model), "token", 1.0)
        elif is_exact(policy := policy_of(config, 1.0)):
            yield one(config, tiered(policy), granularity(policy.page_tokens), 1.0)
        else:
            sparse.append(config)
    for budget in plan.budgets:
        like, fetched = None, budget
        for config in sparse:
            matched = fetched if config.control and config.name != ORACLE else budget
            policy = policy_of(config, matched, like)
            point, measured = one(config, tiered(policy), granularity(policy.page_tokens), budget)
            yield point, measured
            if like is None and not config.control:
                like, fetched = policy, min(1.0, max(measured.moved.fetched_share, 1e-6))
