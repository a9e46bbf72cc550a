from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from stepwell.block.tier import HOST
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.decide import (
    UNKNOWN_LIMIT_S,
    Decision,
    KnownCosts,
    RecallMode,
    RecallQuestion,
    Stretch,
    Why,
    cost_of,
    decide,
    least_cost,
)

TIERS = (HOST, "disk", "shared")
BLOCK = 1 << 20
PREFILL = PrefillCost(0.01, 1e-3, 1e-8, 2048)

seconds = st.floats(0, 1e-2)
speeds = st.builds(TierSpeed, st.floats(0, 0.5), st.floats(0, 1e-6), st.floats(0, 1))
stretches = st.lists(
    st.builds(lambda tier, blocks: Stretch(tier, blocks, blocks * BLOCK), st.sampled_from(TIERS), st.integers(0, 12)),
    max_size=6,
).map(tuple)
prefills = st.builds(PrefillCost, st.floats(0, 0.5), seconds, st.floats(0, 1e-5), st.sampled_from([0, 64, 200, 2048]))


@st.composite
def requests(draw: st.DrawFn) -> RecallQuestion:
    run = draw(stretches)
    tokens = 32 * sum(stretch.blocks for stretch in run) + draw(st.integers(1, 500))
    queued = {tier: draw(st.integers(0, 1 << 30)) for tier in TIERS}
    return RecallQuestion(tokens, 32, run, queued, draw(st.sampled_from([0.0, 0.1, 1.0, 30.0])))


knowns = st.builds(
    KnownCosts, prefills, st.floats(0, 1), st.dictionaries(st.sampled_from(TIERS), speeds, min_size=3, max_size=3)
)


def brute(request: RecallQuestion, known: KnownCosts, cut: int, forgiving: bool) -> float:
    """Seconds to the first token, block by block."""
    tiers = [stretch.tier for stretch in request.stretches for _ in range(stretch.blocks)][:cut]
    total = known.speeds[HOST].seconds(len(tiers) * BLOCK)
    for tier in {*tiers} - {HOST}:
        speed = known.speeds[tier]
        doubt = min(0.5, (speed.doubt**2 + known.doubt**2) ** 0.5) if forgiving else 0
        total += speed.seconds(tiers.count(tier) * BLOCK, request.queued[tier]) * (1 - doubt)
    assert known.prefill is not None
    done = min(32 * cut, request.tokens - 1)
    return max(total, request.busy_s) + known.prefill.seconds(request.tokens - done, done)


@given(requests(), knowns)
def test_no_cut_is_better_than_the_chosen_one(request: RecallQuestion, known: KnownCosts) -> None:
    decision = decide(request, known)
    every = [brute(request, known, cut, True) for cut in range(request.blocks + 1)]
    assert every[decision.blocks] <= min(every) + 1e-9
    plain = [brute(request, known, cut, False) for cut in range(request.blocks + 1)]
    assert abs(least_cost(request, known).seconds - min(plain)) <= 1e-9
    assert abs(cost_of(request, known, decision.blocks).seconds - plain[decision.blocks]) <= 1e-9


def slower(known: KnownCosts, tier: str, factor: float) -> KnownCosts:
    speed = known.speeds[tier]
    changed = TierSpeed(speed.latency_s * factor, speed.byte_s * factor, speed.doubt)
    return dataclasses.replace(known, speeds={**known.speeds, tier: changed})


@given(requests(), knowns, st.sampled_from(TIERS), st.floats(1, 100))
def test_a_slower_tier_never_recalls_more(request: RecallQuestion, known: KnownCosts, tier: str, factor: float) -> None:
    fast, slow = decide(request, known), decide(request, slower(known, tier, factor))
    assert slow.blocks <= fast.blocks or abs(_at_best(fast) - _cut(request, known, slow.blocks)) < 1e-9


@given(requests(), knowns, st.sampled_from(TIERS), st.integers(0, 1 << 32))
def test_a_longer_queue_never_recalls_more(request: RecallQuestion, known: KnownCosts, tier: str, more: int) -> None:
    busy = dataclasses.replace(request, queued={**request.queued, tier: request.queued[tier] + more})
    idle, late = decide(request, known), decide(busy, known)
    assert late.blocks <= idle.blocks or abs(_at_best(idle) - _cut(request, known, late.blocks)) < 1e-9


@given(requests(), knowns, st.floats(1, 100))
def test_a_slower_engine_never_recalls_less(request: RecallQuestion, known: KnownCosts, factor: float) -> None:
    cost = known.prefill
    assert cost is not None
    slow = PrefillCost(cost.step_s * factor, cost.token_s * factor, cost.pair_s * factor, cost.step_tokens)
    before, after = decide(request, known), decide(request, dataclasses.replace(known, prefill=slow))
    assert after.blocks >= before.blocks or abs(_at_best(before) - _cut(request, known, after.blocks)) < 1e-9


def _at_best(decision: Decision) -> float:
    return decision.chosen.at_best if decision.chosen is not None else 0.0


def _cut(request: RecallQuestion, known: KnownCosts, blocks: int) -> float:
    return cost_of(request, known, blocks).at_best if request.blocks else 0.0


@given(requests(), knowns)
def test_nobody_waits_longer_than_computing_takes(request: RecallQuestion, known: KnownCosts) -> None:
    decision = decide(request, known)
    if decision.none is None or decision.chosen is None:
        assert decision.limit_s == UNKNOWN_LIMIT_S
        return
    assert decision.limit_s == decision.none.seconds


def disk(blocks: int, tokens: int = 0, queued: int = 0) -> RecallQuestion:
    return RecallQuestion(tokens or 32 * blocks + 8, 32, (Stretch("disk", blocks, blocks * BLOCK),), {"disk": queued})


def known(mb_s: float, doubt: float = 0.0) -> KnownCosts:
    return KnownCosts(PREFILL, 0.0, {HOST: TierSpeed(0, 1e-10), "disk": TierSpeed(0, 1 / (mb_s * 1e6), doubt)})


BREAK_EVEN = BLOCK / 32 / 1e-3 / 1e6  # MB/s: a block is read as fast as its tokens are computed


def test_the_break_even_bandwidth_is_where_it_changes() -> None:
    assert decide(disk(100), known(1.2 * BREAK_EVEN)).blocks == 100
    refused = decide(disk(100), known(0.8 * BREAK_EVEN))
    assert (refused.blocks, refused.why) == (0, Why.RECOMPUTE_CHEAPER)


def test_a_queue_is_waited_for_only_as_long_as_it_is_worth() -> None:
    assert decide(disk(100, queued=50 * BLOCK), known(2 * BREAK_EVEN)).blocks == 100
    assert decide(disk(100, queued=150 * BLOCK), known(2 * BREAK_EVEN)).blocks == 0


def test_reading_is_free_while_the_engine_computes_for_others() -> None:
    busy = dataclasses.replace(disk(100), busy_s=5.0)
    assert decide(disk(100), known(0.5 * BREAK_EVEN)).blocks == 0
    assert 70 < decide(busy, known(0.5 * BREAK_EVEN)).blocks < 80, "as many as come in these five seconds"
    assert decide(busy, known(0.7 * BREAK_EVEN)).blocks == 100


def test_doubt_is_forgiven_and_no_more() -> None:
    assert decide(disk(100), known(0.8 * BREAK_EVEN, doubt=0.3)).blocks == 100
    assert decide(disk(100), known(0.4 * BREAK_EVEN, doubt=1.0)).blocks == 0


def test_a_part_is_recalled_where_the_rest_is_too_slow() -> None:
    request = RecallQuestion(6408, 32, (Stretch(HOST, 100, 100 * BLOCK), Stretch("disk", 100, 100 * BLOCK)))
    decision = decide(request, known(0.5 * BREAK_EVEN))
    assert (decision.blocks, decision.why) == (100, Why.RECOMPUTE_CHEAPER)


def test_blocks_of_the_arena_behind_slow_ones_are_reached_through_them() -> None:
    request = RecallQuestion(6408, 32, (Stretch("disk", 20, 20 * BLOCK), Stretch(HOST, 180, 180 * BLOCK)))
    assert decide(request, known(0.25 * BREAK_EVEN)).blocks == 200


def test_host_memory_is_weighed_by_the_same_rule() -> None:
    request = RecallQuestion(3208, 32, (Stretch(HOST, 100, 100 * BLOCK),))
    slow = KnownCosts(PREFILL, 0.0, {HOST: TierSpeed(0, 1 / (0.5e6 * BREAK_EVEN))})
    assert decide(request, slow).blocks == 0
    assert decide(request, known(1)).blocks == 100


def test_the_modes_ask_nobody() -> None:
    slow, fast = known(0.01 * BREAK_EVEN), known(100 * BREAK_EVEN)
    always, never = decide(disk(100), slow, RecallMode.ALWAYS), decide(disk(100), fast, RecallMode.NEVER)
    assert (always.blocks, always.why, always.limit_s) == (100, Why.ALWAYS, UNKNOWN_LIMIT_S)
    assert (never.blocks, never.why) == (0, Why.NEVER)
    assert decide(disk(100), KnownCosts(), RecallMode.ALWAYS).blocks == 100
    assert decide(disk(100), KnownCosts(), RecallMode.NEVER).blocks == 0


def test_what_is_unknown_is_recalled_and_learned() -> None:
    nothing = decide(disk(100), KnownCosts())
    assert (nothing.blocks, nothing.why, nothing.limit_s) == (100, Why.UNKNOWN, UNKNOWN_LIMIT_S)
    tier = decide(disk(100), KnownCosts(PREFILL, 0.0, {HOST: TierSpeed(0, 1e-10)}))
    assert (tier.blocks, tier.why) == (100, Why.UNKNOWN)
    assert tier.none is not None
    assert tier.limit_s == tier.none.compute_s


def test_nothing_to_recall_is_said() -> None:
    assert decide(RecallQuestion(100, 32, ()), KnownCosts()).why is Why.EMPTY
    assert decide(RecallQuestion(100, 32, (Stretch("disk", 0, 0),)), known(1)).why is Why.EMPTY
