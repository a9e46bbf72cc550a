"""Anchors are judged from rows as they are kept, and only on evidence."""

from __future__ import annotations

from typing import Any

from stepwell.bench.fidelity import anchors


def kept(policy: str, **other: Any) -> dict[str, Any]:
    usual = {
        "task": "kvtable", "tier": "host", "granularity": "token", "budget": 0.125, "tokens": 2048, "digits": 1200,
        "kl_mean": 0.005, "kl_mean_ci": [0.004, 0.006], "field_difference": -0.005, "field_difference_ci": [-0.01, 0.0],
        "bytes_cold_to_hot": 10, "bytes_all_fp16": 500, "documents": 15, "seeds": 3, "blind": False,
    }  # fmt: skip
    return {"policy": policy, **usual, **other}


def test_traffic_needs_bytes_nearness_and_facts() -> None:
    assert [row.met for row in anchors.traffic([kept("stepwell-tokens")], "stepwell-tokens", anchors.HOST)] == [
        True
    ] * 3
    worse = kept("stepwell-tokens", bytes_cold_to_hot=26, kl_mean=0.011, field_difference=-0.011)
    assert [row.met for row in anchors.traffic([worse], "stepwell-tokens", anchors.HOST)] == [False] * 3


def test_few_digits_judge_no_point() -> None:
    few = kept("stepwell-tokens", digits=999)
    assert [row.met for row in anchors.traffic([few], "stepwell-tokens", anchors.HOST)] == [True, True, None]


def test_blind_tasks_and_other_policies_are_no_anchor() -> None:
    rows = [kept("stepwell-tokens", blind=True), kept("stepwell")]
    assert not list(anchors.traffic(rows, "stepwell-tokens", anchors.HOST))


def test_ours_is_compared_with_what_fetches_no_less() -> None:
    yakv = kept("yakv", budget=0.03, kl_mean=0.1, field_difference=-0.2, bytes_cold_to_hot=20)
    rows = [
        yakv,
        kept("stepwell-tokens", budget=0.25, bytes_cold_to_hot=21, kl_mean=0.0, field_difference=0.0),
        kept("stepwell-tokens", budget=0.125, bytes_cold_to_hot=18, kl_mean=0.03, field_difference=-0.08),
        kept("stepwell-tokens", budget=0.06, bytes_cold_to_hot=9, kl_mean=0.2, field_difference=-0.3),
        kept("stepwell-tokens", task="nat", bytes_cold_to_hot=19, kl_mean=0.0, field_difference=0.0),
    ]
    facts, distance = anchors.at_equal_bytes(rows)
    assert facts.measured is not None and distance.measured is not None
    assert (round(facts.measured.value, 6), facts.met) == (0.4, True)
    assert (round(distance.measured.value, 6), distance.met) == (0.3, True)


def test_only_the_two_tasks_with_the_widest_gap_are_judged() -> None:
    gaps = {"a": -0.05, "b": -0.3, "c": -0.2}
    rows = [
        kept("yakv", task=task, field_difference=gap, kl_mean=0.1, bytes_cold_to_hot=20) for task, gap in gaps.items()
    ]
    rows += [kept("stepwell-tokens", task=task, kl_mean=0.09) for task in gaps]
    found = list(anchors.at_equal_bytes(rows))
    assert [(row.what[0], row.met) for row in found[::2]] == [("b", True), ("c", True), ("a", None)]
    assert [row.met for row in found[1::2]] == [False, False, None]
    assert not list(anchors.at_equal_bytes(rows[:3])), "nothing of ours: nothing is said"
