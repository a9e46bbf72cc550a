"""Results of a played trace: one row for the fleet, one for each of its tiers, one for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepwell.errors import ConfigError
from stepwell.simulate.fleet.description import Fleet
from stepwell.simulate.fleet.engine import Prompt
from stepwell.simulate.fleet.run import Played, play
from stepwell.simulate.fleet.tier import GPU
from stepwell.simulate.traces.trace import Trace

DAY_S = 86_400.0
YEAR_D = 365.25


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds over all requests."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class TierRow:
    """All tiers of one name together, except in fields with `each`. Hits are tokens of prompts that came from there.
    Nothing is written to the GPU's row: its pages are not counted. `written_a_day_bytes`: to each, on average, write
    amplification included. `years_to_wear_out`: of each at that rate; None where nothing is written or no endurance was
    given."""

    tier: str
    hit_tokens: int
    hit_tokens_ratio: float
    capacity_bytes: int
    held_bytes: int
    read_bytes: int
    written_bytes: int
    dropped_bytes: int
    written_a_day_bytes: int
    years_to_wear_out: float | None


@dataclass(frozen=True, slots=True)
class FleetRow:
    """The whole fleet. `hit_tokens_ratio`: tokens found anywhere, over all prompt tokens; `ceiling_ratio`: the same for
    one cache without bounds that all engines share. `ttft`: from a request's arrival to its first token; recall, queue
    and compute are its parts, on average. `gpu_s`: seconds spent on prefill; `prefill_s`: the same if nothing were ever
    found. `without_tiers`: results of the same fleet with nothing below its GPUs; `gpu_saved_s` is the difference.
    `decisions`: number of requests by reason."""

    trace: str
    engines: int
    requests: int
    input_tokens: int
    block_tokens: int
    seconds: float
    hit_tokens_ratio: float
    ceiling_ratio: float
    recomputed_tokens: int
    ttft_s: Seconds
    recall_mean_s: float
    queue_mean_s: float
    compute_mean_s: float
    prefill_s: float
    gpu_s: float
    gpu_saved_s: float
    copied_bytes: int
    lost_requests: int
    decisions: dict[str, int]
    ttft_without_tiers_s: Seconds
    gpu_without_tiers_s: float
    tiers: list[TierRow]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Tokens by where they came from add up to `input_tokens`, those `recomputed` included. ttft_s is recall_s, queue_s
    and compute_s; time lost with an engine that failed is in queue_s."""

    number: int
    arrived_s: float
    engine: int
    input_tokens: int
    ttft_s: float
    recall_s: float
    queue_s: float
    compute_s: float
    tokens: dict[str, int]
    recomputed: int
    why: str


def simulate(fleet: Fleet, trace: Trace) -> tuple[FleetRow, list[RequestRow]]:
    """Plays a trace twice: as described, and with nothing below the GPUs. Raises ConfigError SW-126 as `play` does."""
    played = play(fleet, trace)
    requests = [_request(prompt, trace.block_tokens) for prompt in played.prompts]
    bare = play(fleet.without_tiers(), trace) if fleet.tiers else played
    return _row(fleet, trace, played, requests, bare), requests


def written(path: Path, lines: Iterable[bytes]) -> None:
    """Writes them to the file, which is replaced. Raises ConfigError SW-123 if that cannot be done."""
    try:
        with path.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
    except OSError as error:
        raise ConfigError(
            "SW-123", what=f"{path} cannot take the requests", why=str(error), fix="name another file"
        ) from None


def _row(fleet: Fleet, trace: Trace, played: Played, requests: list[RequestRow], bare: Played) -> FleetRow:
    total = max(1, trace.input_tokens)
    recomputed = sum(row.recomputed for row in requests)
    spent, spent_bare = (sum(engine.spent_s for engine in of.engines) for of in (played, bare))
    prefill = fleet.prefill_cost
    return FleetRow(
        trace=trace.name,
        engines=fleet.engines,
        requests=len(trace),
        input_tokens=trace.input_tokens,
        block_tokens=trace.block_tokens,
        seconds=round(played.seconds, 3),
        hit_tokens_ratio=round(1 - recomputed / total, 6),
        ceiling_ratio=round(float(trace.ceiling().sum()) / total, 6),
        recomputed_tokens=recomputed,
        ttft_s=_seconds(played),
        recall_mean_s=_mean([row.recall_s for row in requests]),
        queue_mean_s=_mean([row.queue_s for row in requests]),
        compute_mean_s=_mean([row.compute_s for row in requests]),
        prefill_s=round(sum(prefill.seconds(n) for n in trace.inputs.tolist()), 3),
        gpu_s=round(spent, 3),
        gpu_saved_s=round(spent_bare - spent, 3),
        copied_bytes=sum(engine.copied_bytes for engine in played.engines),
        lost_requests=sum(prompt.lost > 0 for prompt in played.prompts),
        decisions=dict(sorted(Counter(row.why for row in requests).items())),
        ttft_without_tiers_s=_seconds(bare),
        gpu_without_tiers_s=round(spent_bare, 3),
        tiers=list(_tiers(fleet, trace, played, requests)),
    )


def _tiers(fleet: Fleet, trace: Trace, played: Played, requests: list[RequestRow]) -> Iterator[TierRow]:
    hits = Counter[str]()
    for row in requests:
        hits.update(row.tokens)
    total = max(1, trace.input_tokens)
    block_bytes = fleet.token_bytes * trace.block_tokens
    if fleet.engine.prefix_caching:
        held = sum(engine.gpu.held for engine in played.engines if engine.gpu is not None)
        yield TierRow(
            GPU, hits[GPU], round(hits[GPU] / total, 6), fleet.engine.kv_capacity * fleet.engines, held * block_bytes,
            0, 0, 0, 0, None,
        )  # fmt: skip
    for name, like in fleet.below():
        tiers = played.tiers[name]
        written = sum(tier.written_bytes for tier in tiers)
        a_day = written * like.write_amplification / len(tiers) / max(played.seconds, 1e-9) * DAY_S
        endurance = like.endurance_bytes
        yield TierRow(
            tier=name,
            hit_tokens=hits[name],
            hit_tokens_ratio=round(hits[name] / total, 6),
            capacity_bytes=like.capacity * len(tiers),
            held_bytes=sum(tier.held for tier in tiers) * block_bytes,
            read_bytes=sum(tier.read_bytes for tier in tiers),
            written_bytes=written,
            dropped_bytes=sum(tier.dropped_bytes for tier in tiers),
            written_a_day_bytes=round(a_day),
            years_to_wear_out=round(endurance / a_day / YEAR_D, 6) if endurance and a_day else None,
        )


def _request(prompt: Prompt, block_tokens: int) -> RequestRow:
    tokens: Counter[str] = Counter()
    before = 0
    for level, end in prompt.found:
        known = min(end * block_tokens, prompt.tokens)
        if known > before:
            tokens[level] += known - before
        before = known
    assert prompt.decision is not None
    return RequestRow(
        number=prompt.number,
        arrived_s=round(prompt.arrived, 6),
        engine=prompt.engine,
        input_tokens=prompt.tokens,
        ttft_s=round(prompt.done - prompt.arrived, 6),
        recall_s=round(prompt.recall_s, 6),
        queue_s=round(prompt.started - prompt.arrived - prompt.recall_s, 6),
        compute_s=round(prompt.done - prompt.started, 6),
        tokens=dict(tokens),
        recomputed=prompt.tokens - before,
        why=prompt.decision.why.value,
    )


def _seconds(played: Played) -> Seconds:
    ttft = np.array([prompt.done - prompt.arrived for prompt in played.prompts])
    if not len(ttft):
        return Seconds(0.0, 0.0, 0.0, 0.0)
    p50, p95, p99 = (round(float(value), 6) for value in np.percentile(ttft, (50, 95, 99)))
    return Seconds(_mean(ttft.tolist()), p50, p95, p99)


def _mean(values: list[float]) -> float:
    return round(sum(values) / max(1, len(values)), 6)
