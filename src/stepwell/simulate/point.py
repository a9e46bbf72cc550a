"""One point of a table: a trace, a policy, a capacity."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from stepwell.policies.catalog import POLICIES
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.simulate.groups.model import ModelGroups
from stepwell.simulate.groups.replay import GroupsReplay
from stepwell.simulate.optimal import OPTIMAL, optimal
from stepwell.simulate.replay import Replay, Replayed
from stepwell.simulate.traces.forest import Cost
from stepwell.simulate.traces.trace import Trace

NAMES = (*POLICIES, OPTIMAL)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Output of `stepwell simulate` for a point, field by field. `hit_tokens_ratio`: prompt tokens found by the
    requests' leading runs, over all prompt tokens; `ceiling_ratio`: the same for a tier without bounds.
    `saved_prefill_s`: seconds to compute those tokens, of `prefill_s` for all prompt tokens, both by the preset `cost`.
    `spilled_tokens`: let into the tier. `references_per_s`: blocks asked for, per processor second of the replay.
    `groups`: of a model that keeps more than one kind of KV; None where none is described."""

    trace: str
    policy: str
    capacity_tokens: int
    hit_tokens_ratio: float
    saved_prefill_s: float
    spilled_tokens: int
    references_per_s: int
    cost: str
    ceiling_ratio: float
    prefill_s: float
    requests: int
    input_tokens: int
    working_set_tokens: int
    block_tokens: int
    groups: GroupsRow | None = None


@dataclass(frozen=True, slots=True)
class GroupsRow:
    """`prefix_tokens_ratio`: prompt tokens for which layers that need every token had all, over all prompt tokens.
    Bytes that were let into the tier (`spilled`), and of these those of windows and states (`spilled_tails`); and their
    share of what it held, the mean over the second half of the requests (`tail_share`)."""

    prefix_tokens_ratio: float
    spilled_bytes: int
    spilled_tail_bytes: int
    tail_share: float


def point(
    trace: Trace,
    policy: str,
    capacity_tokens: int,
    cost: PrefillCost,
    cost_name: str,
    model: ModelGroups | None = None,
) -> SweepRow:
    """`policy`: one of NAMES; only of POLICIES for a `model`. A capacity of less than a block holds nothing. Of a model
    it has as many bytes as so many tokens in layers that need every token."""
    started = time.process_time()
    groups: GroupsRow | None = None
    capacity = capacity_tokens // trace.block_tokens
    if model is None:
        replayed = _replay(trace, policy, capacity, cost)
    else:
        ran = GroupsReplay(trace, model, POLICIES[policy](), capacity, _seconds(cost)).run()
        replayed = Replayed(ran.hits, ran.stored_bytes // (model.full_bytes * trace.block_tokens))
        prefix = float(ran.prefixes.sum()) * trace.block_tokens / max(1, trace.input_tokens)
        groups = GroupsRow(round(prefix, 6), ran.stored_bytes, ran.stored_tail_bytes, round(ran.tail_share, 6))
    took_s = time.process_time() - started
    hits = np.minimum(replayed.hits * trace.block_tokens, trace.inputs)
    tokens = max(1, trace.input_tokens)
    return SweepRow(
        trace=trace.name,
        policy=policy,
        capacity_tokens=capacity_tokens,
        hit_tokens_ratio=round(float(hits.sum()) / tokens, 6),
        saved_prefill_s=round(sum(cost.seconds(n) for n in hits.tolist()), 3),
        spilled_tokens=replayed.entered * trace.block_tokens,
        references_per_s=round(len(trace.ids) / took_s),
        cost=cost_name,
        ceiling_ratio=round(float(trace.ceiling().sum()) / tokens, 6),
        prefill_s=round(sum(cost.seconds(n) for n in trace.inputs.tolist()), 3),
        requests=len(trace),
        input_tokens=trace.input_tokens,
        working_set_tokens=trace.distinct * trace.block_tokens,
        block_tokens=trace.block_tokens,
        groups=groups,
    )


def _replay(trace: Trace, policy: str, capacity: int, cost: PrefillCost) -> Replayed:
    if policy == OPTIMAL:
        return optimal(trace, capacity)
    return Replay(trace, POLICIES[policy](), capacity, _seconds(cost)).run()


def _seconds(cost: PrefillCost) -> Cost:
    return lambda first, last: cost.seconds(last - first, first)
