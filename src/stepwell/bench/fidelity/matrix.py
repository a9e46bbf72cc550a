"""Goes through tasks, lengths, documents, budgets and policies. Each document is prefilled once, exactly, for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from stepwell.bench.fidelity import tasks
from stepwell.bench.fidelity.document import Document
from stepwell.bench.fidelity.metrics import compare
from stepwell.bench.fidelity.prefill import Prefilled, prefill
from stepwell.bench.fidelity.rows import Measured, Point, Row, row
from stepwell.bench.fidelity.runner import Full, Runner, Tier, Tiered, granularity, policy_of
from stepwell.bench.fidelity.tasks.own import Own
from stepwell.bench.fidelity.text import Text
from stepwell.bench.fidelity.wishes import FULL, ORACLE, Config

Say = Callable[[str], None]
Found = dict[Point, list[Measured]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `documents` of each of `seeds`, for every task and length; `own` documents beside those or instead.
    `limit_s`: no document is begun that, as long as the longest so far, would end later; one is always run."""

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
class Job:
    """One document, and what its rows are called. `tokens`: 0 where documents are as long as they are."""

    task: str
    tokens: int
    blind: bool
    title: str
    make: Callable[[], Document]


def run(model: Any, text: Text, plan: Plan, say: Say = lambda line: None) -> list[Row]:
    """The rows, in the order of the plan. Raises ConfigError for tasks or policies that cannot be."""
    began = time.monotonic()
    found: Found = {}
    jobs = list(_jobs(text, plan))
    longest = 0.0
    for number, job in enumerate(jobs, 1):
        at = time.monotonic()
        if plan.limit_s is not None and number > 1 and at - began + longest > plan.limit_s:
            say(
                f"stopped after {number - 1} of {len(jobs)} documents: the next may not end within {plan.limit_s:.0f} s"
            )
            break
        prefilled = prefill(model, job.make())
        say(
            f"{number}/{len(jobs)} {job.title}: {len(prefilled.feed)} steps, prefilled in {time.monotonic() - at:.1f} s"
        )
        for point, one in _policies(model, plan, job, prefilled, say):
            found.setdefault(point, []).append(one)
        longest = max(longest, time.monotonic() - at)
    return [row(point, documents, plan.seeds) for point, documents in found.items()]


def _jobs(text: Text, plan: Plan) -> Iterator[Job]:
    """One document of every task and length first, so that a run that is stopped early has something of each."""
    for own in plan.own:
        yield Job(own.task, 0, False, f"line {own.line}", partial(attrgetter("document"), own))
    for name in plan.tasks:
        tasks.named(name)  # a wrong name is told at once
    for number in range(plan.documents):
        for seed in range(plan.seeds):
            for tokens in plan.lengths:
                for name in plan.tasks:
                    title = f"{name}, {tokens} tokens, seed {seed}, document {number}"
                    make = partial(tasks.document, name, text, tokens, seed, number)
                    yield Job(tasks.base_name(name), tokens, tasks.named(name).blind, title, make)


def _policies(model: Any, plan: Plan, job: Job, prefilled: Prefilled, say: Say) -> Iterator[tuple[Point, Measured]]:
    """Full attention once, then every budget; those with a machine of their own first, whose bytes others match."""

    def one(config: Config, runner: Runner, of: str, budget: float) -> tuple[Point, Measured]:
        began = time.monotonic()
        outcome = runner.run(prefilled)
        seconds = time.monotonic() - began
        compared = compare(prefilled.document, prefilled.logits, outcome.logits)
        intensity = prefilled.document.intensity if job.tokens else 0
        point = Point(job.task, config.name, plan.tier, of, budget, job.tokens, intensity, job.blind)
        say(f"  {config.name} at {budget:.2%}, {of}: KL {compared.kl.mean():.4f}, {seconds:.1f} s")
        return point, Measured(prefilled.document.tokens, compared, outcome.moved, seconds)

    ordered = sorted(plan.configs, key=lambda config: config.control)
    for config in ordered:
        if config.name == FULL:
            yield one(config, Full(model), "token", 1.0)
    for budget in plan.budgets:
        like, fetched = None, budget
        for config in ordered:
            if config.name == FULL:
                continue
            matched = fetched if config.control and config.name != ORACLE else budget
            policy = policy_of(config, matched, like)
            runner = Tiered(model, policy, plan.tier, plan.hot_share, plan.disk, plan.audit)
            point, measured = one(config, runner, granularity(policy.page_tokens), budget)
            yield point, measured
            if like is None and not config.control:
                like, fetched = policy, min(1.0, max(measured.moved.fetched_share, 1e-6))
