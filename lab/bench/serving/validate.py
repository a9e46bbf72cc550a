"""The simulator against the real thing: one workload on vLLM with a well, and simulated.

The workload is `workloads.mixed`, on a host tier that holds a tenth of its blocks, once for each policy. The simulator
gets the prompts, the times at which they were asked, the tier's room in blocks, and costs that are fitted to every
third sample; the others are judged. What was hit, it has to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines, workloads
from lab.bench.serving.engines import Shape
from lab.bench.serving.foreseen import fitted, foreseen, trace_of
from lab.bench.serving.inturn import Asked, Blocks, First, ask_all, blocks_of
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate

POLICIES = ("lru", "auto")
PAGE = 32
SLOTS = 154
"""Blocks in the host tier: a tenth of what the prompts have."""

CALIBRATE_EVERY = 3
POINTS, OFF = 2.0, 0.15
"""By how much the share of tokens hit may differ, and the median of seconds to first token, relative."""

_SEED = 1


@dataclass(frozen=True, slots=True)
class Size:
    prompts: int


FULL, QUICK = Size(200), Size(15)


@dataclass(frozen=True, slots=True)
class Both:
    """Of one prompt, measured and simulated: tokens that were hit, and seconds to its first token."""

    tokens: int
    hit: int
    simulated_hit: int
    seconds: float
    simulated_s: float


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    with engines.bench(0) as bench:
        blocks = blocks_of(bench, PAGE)
        prompts = workloads.mixed(workloads.text(bench.encode), size.prompts, _SEED)
        shape = Shape(PAGE, 2 * workloads.LONGEST // PAGE, workloads.LONGEST + PAGE)
        asked = ask_all(bench, POLICIES, blocks.host_bytes(SLOTS), shape, prompts, "mixed prompts")
    return compared(prompts, blocks, asked)


def compared(prompts: Sequence[list[int]], blocks: Blocks, asked: Mapping[str, Asked]) -> Result:
    """What was asked, beside what is simulated of it. Raises ValueError if nothing was measured to calibrate with."""
    found: list[Row] = []
    counts: dict[str, int] = {}
    for policy, of in asked.items():
        cpu, wall = (_both(policy, of, prompts, blocks, seconds) for seconds in (_cpu_s, _wall_s))
        found += [*hit_rows(policy, cpu), *seconds_rows(f"{policy}: CPU seconds to first token", cpu, OFF)]
        found += seconds_rows(f"{policy}: TTFT", wall, None)
        counts |= {f"{policy}_judged": len(cpu), f"{policy}_slots": of.slots}
        counts |= {f"{policy}_{what}": count for what, count in of.recalls.items()}
    trace = trace_of(prompts, [0.0] * len(prompts), blocks.tokens)
    ceiling = int(trace.ceiling().sum()) / trace.input_tokens
    remarks = [
        f"{len(prompts)} prompts, {trace.input_tokens:,} tokens, of which a tier without bounds would hit "
        f"{100 * ceiling:.1f} %; {trace.distinct:,} blocks of {blocks.tokens} tokens, engine page {PAGE}; one request "
        "at a time, no canaries",
        f"every {CALIBRATE_EVERY}rd prompt calibrates, the others are judged; CPU seconds are those of all processes "
        "of engine and well",
    ]
    return Result("validate", found, counts, remarks)


def _cpu_s(first: First) -> float | None:
    return first.cpu_s


def _wall_s(first: First) -> float | None:
    return first.wall_s


def _both(
    policy: str, asked: Asked, prompts: Sequence[list[int]], blocks: Blocks, seconds: Callable[[First], float | None]
) -> list[Both]:
    """Of those that are judged."""
    costs = fitted(asked.firsts[::CALIBRATE_EVERY], seconds)
    trace = trace_of(prompts, [first.at for first in asked.firsts], blocks.tokens)
    simulated = foreseen(trace, blocks, asked.slots, policy, costs)
    return [
        Both(first.tokens, first.hit, row.input_tokens - row.recomputed, took, row.ttft_s)
        for number, (first, row) in enumerate(zip(asked.firsts, simulated, strict=True))
        if number % CALIBRATE_EVERY and (took := seconds(first)) is not None
    ]


def hit_rows(policy: str, both: Sequence[Both]) -> list[Row]:
    what, target = f"{policy}: prompt tokens hit, simulated and real differ by", Target("<=", POINTS)
    if not both:
        return [Row(what, "points", None, target, "nothing was measured")]
    real, simulated = (
        stats.ratio_of_paired_means([(hit, one.tokens) for hit, one in zip(hits, both, strict=True)])
        for hits in ([one.hit for one in both], [one.simulated_hit for one in both])
    )
    same = sum(one.hit == one.simulated_hit for one in both)
    points = 100 * abs(simulated.value - real.value)
    return [
        Row(what, "points", _alone(points, len(both)), target, f"the same of {same} of {len(both)} prompts"),
        Row("  real", "", real),
        Row("  simulated", "", simulated),
    ]


def seconds_rows(what: str, both: Sequence[Both], off: float | None) -> list[Row]:
    """`off`: what is allowed for the median; None: it is not judged."""
    target = Target("<=", off) if off is not None else None
    if not both:
        return [Row(f"{what}, p50, simulated is off by", "", None, target, "nothing was measured")]
    real, simulated = [one.seconds for one in both], [one.simulated_s for one in both]
    at_p50 = float(np.median(simulated) / np.median(real)) - 1
    at_mean = fmean(simulated) / fmean(real) - 1
    each = [abs(one.simulated_s / one.seconds - 1) for one in both]
    return [
        Row(f"{what}, p50, simulated is off by", "", _alone(abs(at_p50), len(both)), target, f"{at_p50:+.1%}"),
        Row("  real", "s", stats.median(real)),
        Row("  simulated", "s", stats.median(simulated)),
        Row("  mean, simulated is off by", "", _alone(abs(at_mean), len(both)), None, f"{at_mean:+.1%}"),
        Row("  real", "s", stats.mean(real)),
        Row("  simulated", "s", stats.mean(simulated)),
        Row("  one prompt is off by, p50", "", stats.median(each)),
    ]


def _alone(value: float, samples: int) -> Estimate:
    return Estimate(value, value, value, samples)
