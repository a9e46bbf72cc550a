"""Benchmarks that replay a workload: prompts, what is fitted to and simulated of them, what rows say. No engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from lab.bench.serving import half, validate, workloads
from lab.bench.serving.foreseen import Costs, fitted, foreseen, trace_of
from lab.bench.serving.inturn import Asked, Blocks, First
from lab.bench.serving.validate import Both
from stepwell.demo.results import stats
from stepwell.policies.costs.prefill import pairs
from stepwell.simulate.traces.trace import Trace

SEED = 3
BLOCKS = Blocks(32, 23_040)
COSTS = Costs(0.05, 1e-3, 2e-7, 0.004, 1e-5)


def text(count: int = 20_000) -> list[int]:
    """No two places of it are alike."""
    return Random(SEED).sample(range(10 * count), count)


def first(tokens: int, hit: int, at: float = 0.0, costs: Costs = COSTS, factor: float = 1.0) -> First:
    """As an engine that these costs describe exactly."""
    new = tokens - hit
    took = costs.step_s + costs.token_s * new + costs.pair_s * pairs(new, hit)
    took += costs.latency_s * (hit > 0) + costs.copied_token_s * hit
    return First(at, tokens, hit, took, factor * took)


# --- workloads --------------------------------------------------------------------------------------------------------


def test_users_share_the_beginning_and_nothing_else() -> None:
    prompts = workloads.users(text(), 18, 64, 551)
    assert {len(prompt) for prompt in prompts} == {615}
    assert {tuple(prompt[:64]) for prompt in prompts} == {tuple(prompts[0][:64])}
    own = [token for prompt in prompts for token in prompt[64:]]
    assert len(set(own)) == len(own)


def test_a_cycle_asks_everyone_once_a_round() -> None:
    assert workloads.cyclic(3, 2) == [0, 1, 2, 0, 1, 2]


def test_draws_are_skewed_and_repeatable() -> None:
    drawn = workloads.zipf(18, 20_000, SEED)
    assert drawn == workloads.zipf(18, 20_000, SEED) != workloads.zipf(18, 20_000, SEED + 1)
    counts = [drawn.count(user) for user in range(18)]
    assert [counts[0] / counts[rank - 1] for rank in (2, 3, 9)] == pytest.approx([2, 3, 9], rel=0.2)


def test_a_mix_has_conversations_that_grow_and_prompts_asked_once() -> None:
    prompts = workloads.mixed(text(), 300, SEED)
    assert prompts == workloads.mixed(text(), 300, SEED)
    system = tuple(next(p for p, q in pairwise(prompts) if p[:160] == q[:160])[:160])
    talks = [prompt for prompt in prompts if tuple(prompt[:160]) == system]
    assert 0.1 < 1 - len(talks) / len(prompts) < 0.3
    assert max(map(len, prompts)) <= workloads.LONGEST
    heads = {tuple(talk[:260]) for talk in talks}
    for head in heads:
        lengths = [len(talk) for talk in talks if tuple(talk[:260]) == head]
        assert lengths == sorted(lengths)
    assert len(talks) / len(heads) > 4, "some turns each"


# --- the simulator's side ---------------------------------------------------------------------------------------------


def test_host_memory_of_whole_slabs() -> None:
    assert BLOCKS.nbytes == 737_280
    for slots in (110, 132, 153, 154, 10_000):
        host = BLOCKS.host_bytes(slots)
        assert 0.9 * slots < BLOCKS.slots_of(host) <= slots
    with pytest.raises(ValueError, match="no host tier"):
        BLOCKS.host_bytes(80)


def test_costs_are_found_again_in_spite_of_disturbances() -> None:
    random = Random(SEED)
    firsts = [first(tokens := random.randint(200, 1500), 32 * random.randint(0, tokens // 32)) for _ in range(60)]
    found = fitted([*firsts, replace(firsts[0], cpu_s=None)], lambda one: one.cpu_s)
    assert [first(one.tokens, one.hit, costs=found).wall_s / one.wall_s for one in firsts] == pytest.approx(
        [1] * 60, rel=0.02
    )
    disturbed = [replace(one, wall_s=4 * one.wall_s) if random.random() < 0.1 else one for one in firsts]
    found = fitted(disturbed, lambda one: one.wall_s)
    longer = [first(one.tokens, one.hit, costs=found).wall_s / one.wall_s for one in firsts]
    assert longer == pytest.approx([longer[0]] * 60, rel=0.05), "in proportion"
    assert sum(a * b.wall_s for a, b in zip(longer, firsts, strict=True)) == pytest.approx(
        sum(one.wall_s for one in disturbed)
    )
    with pytest.raises(ValueError, match="nothing was measured"):
        fitted([replace(firsts[0], cpu_s=None)], lambda one: one.cpu_s)


def trace(prompts: list[list[int]]) -> Trace:
    return trace_of(prompts, [7.0 + 0.5 * at for at in range(len(prompts))], 32)


def test_a_trace_names_full_blocks_with_all_before_them() -> None:
    a, b = text(100)[:80], text(200)[100:]
    found = trace([a, a[:40] + b[:60], b[:31], a])
    assert found.inputs.tolist() == [80, 100, 31, 80]
    assert [found.request(at).tolist() for at in range(4)] == [[0, 1], [0, 2, 3], [], [0, 1]]
    assert found.times.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_what_is_foreseen_of_an_engine_that_is_as_described() -> None:
    """Three prompts in turn, room for two: LRU has none of them when it comes back, and half of a prompt is left."""
    prompts = [text()[at * 500 :][:330] for at in (0, 1, 2, 0, 0)]
    rows = foreseen(trace(prompts), BLOCKS, 20, "lru", COSTS)
    hits = [row.input_tokens - row.recomputed for row in rows]
    assert hits == [0, 0, 0, 0, 320]
    for row, hit in zip(rows, hits, strict=True):
        assert row.ttft_s == pytest.approx(first(330, hit).wall_s, rel=0.01)
        assert row.queue_s == 0


def test_prompts_do_not_meet_where_their_costs_are_longer_than_the_time_between_them() -> None:
    prompt = text()[:1000]
    rows = foreseen(trace([prompt] * 3), BLOCKS, 100, "lru", replace(COSTS, step_s=4.0))
    assert [row.input_tokens - row.recomputed for row in rows] == [0, 992, 992]


def test_the_simulator_agrees_with_itself_to_the_block_and_tells_what_others_do() -> None:
    """In place of an engine: costs that are known, hits of the same policy; and one that never hits."""
    prompts = workloads.mixed(text(), 60, SEED)
    at = [1.3 * number for number in range(60)]
    rows = foreseen(trace_of(prompts, at, 32), BLOCKS, 110, "lru", COSTS)
    real = [
        first(row.input_tokens, row.input_tokens - row.recomputed, when) for row, when in zip(rows, at, strict=True)
    ]
    same = validate.compared(prompts, BLOCKS, {"lru": Asked(real, 110, {"missed_too_slow": 3})})
    assert verdicts(list(same.rows)) == [True, True]
    assert same.rows[0].beside == "the same of 40 of 40 prompts"
    assert same.counts == {"lru_judged": 40, "lru_slots": 110, "lru_missed_too_slow": 3}
    cold = [first(one.tokens, 0, one.at) for one in real]
    other = validate.compared(prompts, BLOCKS, {"lru": Asked(cold, 110, {})})
    assert verdicts(list(other.rows)) == [False, False]


# --- rows -------------------------------------------------------------------------------------------------------------


def verdicts(rows: list[half.Row]) -> list[bool | None]:
    return [row.met for row in rows if row.target is not None]


def test_the_cycle_is_judged_by_hits_and_by_processor_time() -> None:
    lru = [first(615, 64) for _ in range(20)]
    kept = [first(615, 608 if at % 2 else 64) for at in range(20)]
    assert verdicts(half.cyclic_rows(list(zip(kept, lru, strict=True)))) == [True, True]
    assert verdicts(half.cyclic_rows(list(zip(lru, lru, strict=True)))) == [False, False]
    slow = [first(615, one.hit, factor=2.0) for one in kept]
    assert verdicts(half.cyclic_rows(list(zip(slow, lru, strict=True)))) == [True, False]


def test_zipf_is_judged_against_lru() -> None:
    lru = [first(615, 608 if at % 3 else 64) for at in range(30)]
    better = [first(615, 608 if at % 6 else 64) for at in range(30)]
    assert verdicts(half.zipf_rows(list(zip(better, lru, strict=True)))) == [True, True]
    assert verdicts(half.zipf_rows(list(zip(lru, lru, strict=True)))) == [True, True]
    assert verdicts(half.zipf_rows(list(zip(lru, better, strict=True)))) == [False, False]


def test_a_prompt_whose_processor_time_is_missing_is_left_out_of_that() -> None:
    one = first(615, 64)
    rows = half.cyclic_rows([(one, one), (replace(one, cpu_s=None), one)])
    (judged,) = [row for row in rows if row.what.startswith("cyclic: mean CPU")]
    assert judged.measured is not None and judged.measured.count == 1
    (judged,) = [row for row in half.cyclic_rows([(replace(one, cpu_s=None), one)]) if "mean CPU" in row.what]
    assert judged.measured is None


def test_hits_may_differ_by_two_points() -> None:
    same = [Both(1000, 500, 500, 1.0, 1.0)] * 9
    for hit, met in ((330, True), (310, True), (290, False), (690, True), (710, False)):
        rows = validate.hit_rows("lru", [*same, Both(1000, 500, hit, 1.0, 1.0)])
        assert verdicts(rows) == [met], hit
        assert rows[0].beside == "the same of 9 of 10 prompts"
    assert verdicts(validate.hit_rows("lru", [])) == [None]


def test_the_median_of_seconds_may_be_off_by_15_per_cent_either_way() -> None:
    for off, met in ((1.14, True), (1.16, False), (0.86, True), (0.84, False)):
        rows = validate.seconds_rows("x", [Both(1000, 0, 0, took, off * took) for took in (0.5, 1.0, 3.0)], 0.15)
        assert verdicts(rows) == [met], off
    assert verdicts(validate.seconds_rows("x", [Both(1000, 0, 0, 1.0, 1.0)], None)) == []


def test_pairs_are_drawn_together() -> None:
    random = Random(SEED)
    long = [random.choice([0.1, 1.0]) for _ in range(200)]
    samples = [(random.gauss(0.9, 0.02) * took, took) for took in long]
    together = stats.ratio_of_paired_means(samples)
    apart = stats.ratio_of_means([a for a, _ in samples], [b for _, b in samples])
    assert together.value == pytest.approx(apart.value)
    assert together.low < 0.9 < together.high
    assert together.high - together.low < (apart.high - apart.low) / 5
    with pytest.raises(ValueError, match="nothing was measured"):
        stats.ratio_of_paired_means([])
