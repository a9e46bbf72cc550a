"""The replay of one tier: what must hold whatever the policy, and models that are too plain to be wrong."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tiers import (
    PlainArc,
    PlainLfu,
    PlainLru2,
    PlainS3Fifo,
    PlainSecondTouch,
    PlainSieve,
    PlainTier,
    leading,
)
from small_traces import seconds, trace_of, traces

from stepwell.policies.catalog import POLICIES
from stepwell.policies.past import MIN_REMEMBERED, Past
from stepwell.policies.reuse import CLASSES, class_of
from stepwell.simulate.optimal import optimal
from stepwell.simulate.replay import Replay
from stepwell.simulate.traces.forest import BlockRun, Forest
from stepwell.simulate.traces.trace import Trace

CAPACITIES = st.integers(0, 12)


def replay(trace: Trace, policy: str, capacity: int) -> Replay:
    return Replay(trace, POLICIES[policy](), capacity, seconds)


def paths(trace: Trace) -> list[list[int]]:
    return [trace.request(i).tolist() for i in range(len(trace))]


class Watched(Replay):
    """Looks at everything before and after each request."""

    def _request(self, now: float, first: int, last: int) -> int:
        path = self._trace.ids[first:last].tolist()
        before = self._blocks()
        entered = self._store.entered
        hit = super()._request(now, first, last)
        after = self._blocks()
        assert hit == leading(path, before)
        assert len(after) <= self._store._capacity
        assert after <= before | set(path)
        assert self._store.entered - entered >= len(after - before)
        assert leading(path, after) >= hit, "nobody makes room with what is asked for"
        return hit

    def _blocks(self) -> set[int]:
        """What is held, as seen in the forest."""
        ids = self._trace.ids
        runs = {id(run): run for run in self._store._forest._heads if run is not None}.values()
        blocks: list[int] = []
        for run in runs:
            assert run.size > 0
            assert all(kid.parent is run for kid in run.kids)
            assert run.children == sum(kid.held for kid in run.kids)
            assert run.seconds == seconds(run.start * 16, (run.start + run.size) * 16)
            assert run.parent is None or run.start == run.parent.start + run.parent.size
            if run.held:
                assert run.parent is None or run.parent.held, "closed under prefixes"
                assert run.uses
                blocks += ids[run.base : run.base + run.size].tolist()
        assert len(blocks) == len(set(blocks)) == self._store.held
        return set(blocks)


def remembering(replay: Replay, blocks: int) -> None:
    """Real bounds are too wide for small traces."""
    replay._store._past = Past[BlockRun](blocks, replay._store._forget)


@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces(), capacity=CAPACITIES, memory=st.sampled_from([0, 3, 20, MIN_REMEMBERED]))
def test_what_holds_for_every_policy(policy: str, trace: Trace, capacity: int, memory: int) -> None:
    watched = Watched(trace, POLICIES[policy](), capacity, seconds)
    again = replay(trace, policy, capacity)
    for one in (watched, again):
        remembering(one, memory)
    replayed, same = watched.run(), again.run()
    assert (replayed.hits.tolist(), replayed.entered) == (same.hits.tolist(), same.entered)
    assert replayed.hits.sum() <= optimal(trace, capacity).hits.sum()
    assert (replayed.hits * trace.block_tokens <= trace.ceiling()).all()


@given(trace=traces(), capacity=CAPACITIES, memory=st.sampled_from([0, 3, 20]))
def test_what_is_held_or_remembered_is_at_risk_of_being_used(trace: Trace, capacity: int, memory: int) -> None:
    """All of it, and nothing else, however runs are cut, evicted and forgotten."""
    default = replay(trace, "auto", capacity)
    remembering(default, memory)
    default.run()
    expected = [0] * CLASSES
    remembered = 0
    for run in {id(run): run for run in default._store._forest._heads if run is not None}.values():
        if run.uses:
            expected[class_of(run.uses)] += run.size
        remembered += run.size if run.uses and not run.held else 0
    assert remembered <= memory
    past = default._store._past
    assert not any(run.held for run in past)
    assert not past.wrong(run for run in default._store._forest._heads if run is not None and run.uses and not run.held)
    alive = [np.array(cohort.alive) for cohort in default._store._eviction._reuse._cohorts._cohorts]  # type: ignore[attr-defined]
    assert sum(alive, np.zeros(CLASSES)).tolist() == expected


@pytest.mark.parametrize("policy", [*POLICIES, "opt"])
@settings(max_examples=30)
@given(trace=traces())
def test_with_room_for_all_nothing_is_lost(policy: str, trace: Trace) -> None:
    replayed = optimal(trace, trace.distinct) if policy == "opt" else replay(trace, policy, trace.distinct).run()
    if policy == "second_touch":
        assert replayed.entered <= trace.distinct
    else:
        assert (replayed.hits * trace.block_tokens == trace.ceiling()).all()


# --- plain models


class Single(Forest):
    """Runs of one block each."""

    def _grow(self, base: int, start: int, size: int, parent: BlockRun | None) -> BlockRun:
        return super()._grow(base, start, 1, parent)


def by_block(trace: Trace, policy: str, capacity: int) -> Replay:
    made = replay(trace, policy, capacity)
    made._store._forest = Single(trace, seconds, made._store._parted)
    return made


RANKED = {"lru": PlainTier, "second_touch": PlainSecondTouch, "lru2": PlainLru2, "lfu": PlainLfu}
QUEUED = {"sieve": PlainSieve, "s3fifo": PlainS3Fifo, "arc": PlainArc}
"""These look at items one after the other, so runs are more to them than their blocks."""


@pytest.mark.parametrize("policy", [*RANKED, *QUEUED])
@given(trace=traces(), capacity=CAPACITIES)
def test_a_plain_model_comes_to_the_same(policy: str, trace: Trace, capacity: int) -> None:
    model = {**RANKED, **QUEUED}[policy](capacity)
    hits = [model.request(float(now), path) for now, path in enumerate(paths(trace))]
    for one in [by_block] if policy in QUEUED else [by_block, replay]:
        replayed = one(trace, policy, capacity).run()
        assert replayed.hits.tolist() == hits
        assert replayed.entered == model.entered


# --- the optimum


def most_hits(trace: Trace, capacity: int) -> int:
    """Of all that a tier could hold after each request: what it held before, and what came, however it chooses."""
    best = {frozenset[int](): 0}
    for path in paths(trace):
        then: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            pool = held | set(path)
            got = hits + leading(path, set(held))
            for kept in combinations(sorted(pool), min(capacity, len(pool))):
                then[frozenset(kept)] = max(then.get(frozenset(kept), 0), got)
        best = then
    return max(best.values())


@given(trace=traces(requests=8, blocks=3, letters=2), capacity=st.integers(0, 4))
def test_no_choice_hits_more_than_the_optimum(trace: Trace, capacity: int) -> None:
    assert optimal(trace, capacity).hits.sum() == most_hits(trace, capacity)


@given(trace=traces(), capacity=CAPACITIES)
def test_the_optimum_holds_what_is_asked_for_next(trace: Trace, capacity: int) -> None:
    """Request by request, with a plain set."""
    asked = paths(trace)
    held: set[int] = set()
    hits, entered = [], 0
    for i, path in enumerate(asked):
        hits.append(leading(path, held))

        def next_use(block: int, i: int = i) -> tuple[int, int]:
            later = (n for n in range(i + 1, len(asked)) if block in asked[n])
            return next(later, len(asked)), block  # of one prefix, the first blocks have the lower ids

        wanted = sorted(block for block in held | set(path) if next_use(block)[0] < len(asked))
        kept = set(sorted(wanted, key=next_use)[:capacity])
        entered += len(kept - held)
        held = kept
    replayed = optimal(trace, capacity)
    assert replayed.hits.tolist() == hits
    assert replayed.entered == entered


# --- details


def test_requests_of_one_moment_come_one_after_the_other() -> None:
    trace = trace_of(["a", "b", "a", "c", "a"], gaps=[0.0] * 4)
    assert replay(trace, "lru", 2).run().hits.tolist() == [0, 0, 1, 0, 1]


def test_a_request_larger_than_the_tier_keeps_its_beginning() -> None:
    replayed = replay(trace_of(["abcdef", "abcdef", "abcdef"]), "lru", 4).run()
    assert replayed.hits.tolist() == [0, 4, 4]
    assert replayed.entered == 4


def test_only_as_much_of_a_victim_goes_as_is_needed() -> None:
    replayed = replay(trace_of(["abcdef", "xy", "abcdef"]), "lru", 6).run()
    assert replayed.hits.tolist() == [0, 0, 4]
    assert replayed.entered == 6 + 2 + 2
