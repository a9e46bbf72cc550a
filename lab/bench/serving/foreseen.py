"""What the simulator says of prompts that a real engine was asked: the same prompts as a trace, costs that were fitted
to some of the real samples, a fleet of one engine with one host tier.

The engine's seconds to first token (of the clock, or of its processors) are taken as a step's, each new token's and
each pair's of tokens, as `policies.prefill` has it, and for what is recalled a latency and each token's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lab.bench.serving.inturn import Blocks, First
from stepwell.policies.costs.prefill import pairs
from stepwell.policies.costs.robust import fit
from stepwell.simulate.fleet.description import EngineDescription, Fleet, Prefill, TierDescription
from stepwell.simulate.fleet.results import RequestRow, simulate
from stepwell.simulate.traces.assemble import Columns, assemble
from stepwell.simulate.traces.chains import Blocks as Ids
from stepwell.simulate.traces.chains import starts_of
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace

STRETCH = 16.0
"""How many times later than in the real run prompts come: there none came before the one before it was done, and costs
in seconds of several processors may be more than the pauses between them. A power of two, so that what learns of ages
in bins that widen by the square root of two finds the same prompts in one bin."""

_ANY_SPEED = 10**15
_BELIEVED = 0.01
"""Samples that proportionality to new tokens counts for before there are any."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    step_s: float
    token_s: float
    pair_s: float
    latency_s: float
    copied_token_s: float


def fitted(firsts: Sequence[First], seconds: Callable[[First], float | None]) -> Costs:
    """From these samples, those without `seconds` left out: in proportions that outliers hardly change, and together as
    long as all samples together, since who else uses the machine will do so again. Raises ValueError if none is left.
    """
    known = [(first, took) for first in firsts if (took := seconds(first)) is not None]
    if not known:
        raise ValueError("nothing was measured")
    rows = [
        [1.0, (new := first.tokens - first.hit), pairs(new, first.hit), float(first.hit > 0), first.hit]
        for first, _ in known
    ]
    x, took_s = np.array(rows, np.float64), np.array([took for _, took in known])
    found = fit(x, took_s, np.ones(len(known)), np.array([0.0, 1.0, 0.0, 0.0, 0.0]), _BELIEVED).coefficients
    return Costs(*map(float, found * took_s.sum() / (x @ found).sum()))


def trace_of(prompts: Sequence[Sequence[int]], at: Sequence[float], block_tokens: int) -> Trace:
    """Prompts that came `at` these times, in seconds from anywhere; of each its full blocks."""
    names: dict[tuple[int, ...], int] = {}  # assemble makes them chained
    ids = [
        [
            names.setdefault(tuple(prompt[start : start + block_tokens]), len(names))
            for start in range(0, len(prompt) - block_tokens + 1, block_tokens)
        ]
        for prompt in prompts
    ]
    starts = starts_of(np.array([len(of_one) for of_one in ids], np.int64))
    flat = np.array([id for of_one in ids for id in of_one], np.int64)
    none = np.full(len(prompts), -1, np.int64)
    inputs = np.array([len(prompt) for prompt in prompts], np.int64)
    columns = Columns(np.array(at, np.float64), inputs, np.ones_like(inputs), none)
    return assemble("prompts", block_tokens, columns, Ids(starts, flat), Problems("prompts"))


def foreseen(trace: Trace, blocks: Blocks, slots: int, policy: str, costs: Costs) -> list[RequestRow]:
    """A row for each request, in their order: one engine without a prefix cache of its own, and a host tier with room
    for so many blocks."""
    copy = blocks.token_bytes / max(costs.copied_token_s, 1e-9)
    host = TierDescription(
        capacity=slots * blocks.nbytes, read_bandwidth=int(copy), write_bandwidth=_ANY_SPEED,
        latency=costs.latency_s, policy=policy,
    )  # fmt: skip
    fleet = Fleet(
        prefill=Prefill(step_s=costs.step_s, token_s=costs.token_s, pair_s=costs.pair_s),
        kv_token_bytes=blocks.token_bytes,
        engine=EngineDescription(prefix_caching=False, link=_ANY_SPEED),
        tiers={"host": host},
        speed=1 / STRETCH,
    )
    return simulate(fleet, trace)[1]
