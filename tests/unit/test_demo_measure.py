"""The demo's rule for pairs: only fair ones count, and the numbers printed are those of the samples."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import msgspec
import pytest

from stepwell.demo.results import report
from stepwell.demo.results.measure import Drop, Pair, counted, drops, ratio
from stepwell.demo.results.result import DemoResult, DemoSetting, Samples, summarise
from stepwell.demo.wire import Answer


def answer(
    ttft_s: float = 0.1, *, local: int | None = 0, external: int | None = 0, tokens: tuple[int, ...] = (1, 2)
) -> Answer:
    return Answer(
        ttft_s=ttft_s,
        total_s=ttft_s + 1,
        prompt_tokens=2001,
        token_ids=list(tokens),
        text="",
        finish_reason="length",
        cached_tokens=(local or 0) + (external or 0),
        local_tokens=local,
        external_tokens=external,
    )


def pair(recall_s: float = 0.2, hit_s: float = 0.1, document: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Pair:
    return Pair(document, answer(recall_s, external=1920, tokens=tokens), answer(hit_s, local=1920))


SETTING = DemoSetting(
    model="m",
    engine="vllm 0",
    documents=2,
    document_tokens=4000,
    page=128,
    pool_pages=9,
    rounds=1,
    host_bytes=1 << 20,
    seconds=1.0,
)


@pytest.mark.parametrize(
    ("recall", "hit", "expected"),
    [
        (answer(external=1920), answer(local=1920), None),
        (answer(), answer(local=1920), Drop.NOT_RECALLED),
        (answer(local=1920), answer(local=1920), Drop.NOT_RECALLED),
        (answer(local=None, external=None), answer(local=1920), Drop.NOT_RECALLED),
        (answer(local=128, external=1792), answer(local=1920), Drop.PARTLY_LOCAL),
        (answer(local=None, external=1920), answer(local=1920), Drop.PARTLY_LOCAL),
        (answer(external=1920), answer(external=1920), Drop.HIT_NOT_LOCAL),
        (answer(external=1920), answer(local=1792, external=128), Drop.HIT_NOT_LOCAL),
        (answer(external=1920), answer(), Drop.HIT_NOT_LOCAL),
        (answer(external=1792), answer(local=1920), Drop.UNEQUAL),
    ],
)
def test_a_pair_counts_only_if_it_is_fair(recall: Answer, hit: Answer, expected: Drop | None) -> None:
    assert Pair(0, recall, hit).drop == expected


def test_what_host_memory_had_does_not_count_as_recalled_from_disk() -> None:
    for tiers, expected in (({"host": 128, "disk": 1792}, None), ({"host": 1920}, Drop.NOT_FROM_DISK)):
        receipt = {"stepwell": {"tiers": tiers}}
        recall = msgspec.structs.replace(answer(external=1920), kv_transfer_params=receipt)
        assert Pair(0, recall, answer(local=1920), disk=True).drop == expected


@pytest.mark.parametrize(("tokens", "same"), [((1, 2), True), ((1, 3), False)])
def test_where_an_engine_has_no_hits_recalls_are_compared_with_cold_answers(
    tokens: tuple[int, ...], same: bool
) -> None:
    recalled = Pair(0, answer(0.2, external=1920, tokens=tokens), answer(0.2, external=1920, tokens=tokens))
    samples = Samples([answer(4.0)], [answer(0.2, external=1920)], [recalled], [recalled])
    result = summarise(replace(SETTING, keeps_prefixes=False), samples)
    assert (result.identical, result.ok, result.pairs) == (same, same, 2)
    assert (result.host_ratio, result.engine_hit_ttft_s) == (None, None)
    assert result.host_speedup == pytest.approx(20.0)
    assert f"cold ones, as this engine has no hits: {'yes' if same else 'NO'}" in report.text(result)


def test_dropped_pairs_are_counted_by_reason_and_left_out() -> None:
    unfair = Pair(1, answer(), answer(local=1920))
    pairs = [pair(), unfair, pair(), unfair]
    assert counted(pairs) == [pairs[0], pairs[2]]
    assert drops(pairs) == {Drop.NOT_RECALLED: 2}


def test_the_interval_holds_the_median_and_the_truth() -> None:
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    values = [rng.gauss(1.05, 0.1) for _ in range(400)]
    found = ratio(values)
    assert found is not None
    assert found.count == 400
    assert found.low < found.median < found.high
    assert found.low < 1.05 < found.high
    # 1.253 sigma / sqrt(n) is the standard error of a median, and the interval has about four of them.
    assert found.high - found.low < 6 * 1.253 * 0.1 / 20
    assert ratio(values) == found


def test_no_values_have_no_ratio() -> None:
    assert ratio([]) is None


def test_ratios_are_medians_of_paired_ratios_and_not_ratios_of_medians() -> None:
    # Ratios 2, 2 and 1; the medians' ratio would be 3.
    host = [pair(0.2, 0.1, 0), pair(6.0, 3.0, 1), pair(0.1, 0.1, 1)]
    samples = Samples([answer(4.0), answer(8.0)], [answer(0.1, local=1920), answer(0.1, local=1920)], host, [])
    result = summarise(SETTING, samples)
    assert result.host_ratio == 2.0
    assert result.host_ratio_ci == (1.0, 2.0)
    assert result.host_speedup == pytest.approx(20.0)  # 4 / 0.2, 8 / 6 and 8 / 0.1: each document against itself
    assert result.cold_ttft_s == 6.0
    assert result.host_recall_ttft_s == 0.2
    assert result.restart_ratio is None
    assert result.restart_ratio_ci is None
    assert not result.ok


def test_the_hit_of_a_restart_pair_is_one_of_the_new_engine() -> None:
    samples = Samples([answer(4.0)], [answer(0.1, local=1920)], [pair(0.2, 0.1)], [pair(0.9, 0.5), pair(0.6, 0.5)])
    result = summarise(SETTING, samples)
    assert result.engine_hit_ttft_s == 0.1
    assert result.restart_hit_ttft_s == 0.5
    assert result.restart_first_ttft_s == 0.9
    assert result.restart_ratio == pytest.approx(1.5)
    assert result.ok


@pytest.mark.parametrize("where", ["host", "restart"])
def test_one_other_answer_is_not_identical(where: str) -> None:
    other = pair(tokens=(1, 3))
    samples = Samples(
        [answer(4.0)],
        [answer(0.1, local=1920)],
        [pair(), other] if where == "host" else [pair()],
        [pair(), other] if where == "restart" else [pair()],
    )
    result = summarise(SETTING, samples)
    assert result.identical is False
    assert not result.ok
    assert "NO" in report.text(result)


def test_nothing_recalled_is_said_and_not_called_identical() -> None:
    unfair = Pair(0, answer(4.0), answer(local=1920))
    result = summarise(SETTING, Samples([answer(4.0)], [answer(0.1, local=1920)], [unfair], [unfair]))
    assert result.identical is None
    assert (result.dropped_pairs, result.dropped_not_recalled, result.recalled_tokens) == (2, 2, 0)
    assert not result.ok
    assert "nothing was recalled" in report.text(result)


def test_recalled_tokens_are_those_of_all_recalls_dropped_ones_too() -> None:
    partly = Pair(0, answer(local=128, external=1792), answer(local=1920))
    result = summarise(SETTING, Samples([answer(4.0)], [answer(0.1, local=1920)], [pair(), partly], [pair()]))
    assert result.recalled_tokens == 1920 + 1792 + 1920


def test_json_is_one_flat_line() -> None:
    samples = Samples([answer(4.0)], [answer(0.1, local=1920)], [pair()], [pair()])
    line = report.json_line(summarise(SETTING, samples))
    assert "\n" not in line
    parsed = json.loads(line)
    assert list(parsed) == [field.name for field in fields(DemoResult)]
    assert not any(isinstance(value, dict) for value in parsed.values())
    needed = (
        "cold_ttft_s engine_hit_ttft_s host_recall_ttft_s restart_recall_ttft_s host_ratio restart_ratio host_speedup"
        " identical recalled_tokens documents dropped_pairs host_bytes model engine"
    )
    assert all(parsed[name] is not None for name in needed.split())


def test_the_table_fits_80_columns() -> None:
    samples = Samples([answer(4.0)], [answer(0.1, local=1920)], [pair()], [pair(), Pair(0, answer(), answer())])
    lines = report.text(summarise(SETTING, samples)).splitlines()
    assert max(len(line) for line in lines if "rm -r" not in line) <= 80


def test_each_row_of_the_table_says_how_many_pairs_it_rests_on() -> None:
    samples = Samples([answer(4.0)], [answer(0.1, local=1920)], [pair(), pair()], [pair(), Pair(0, answer(), answer())])
    lines = report.text(summarise(SETTING, samples)).splitlines()
    host, restart = (next(line for line in lines if name in line) for name in ("the host tier", "a new engine"))
    assert host.endswith("; 2)") and restart.endswith("; 1)")
