"""Anchors are judged from rows as they are kept, and only on evidence."""

from __future__ import annotations

from typing import Any

from lab.bench.longctx.anchors import published as anchors


def kept(policy: str, **other: Any) -> dict[str, Any]:
    usual = {
        "task": "kvtable", "tier": "host", "granularity": "token", "budget": 0.125, "tokens": 2048, "digits": 1200,
        "kl_mean": 0.005, "kl_mean_ci": [0.004, 0.006], "field_difference": -0.005, "field_difference_ci": [-0.01, 0.0],
        "bytes_cold_to_hot": 10, "bytes_all_fp16": 500, "documents": 15, "seeds": 3, "blind": False,
        "steps": 1536, "hot_bytes": 100, "index_bytes": 0,
    }  # fmt: skip
    return {"policy": policy, **usual, **other}


def first(*rows: dict[str, Any], **more: Any) -> Any:
    return next(anchors.traffic(rows, "stepwell-tokens", anchors.HOST, **more))


def test_traffic_needs_bytes_nearness_and_facts_of_one_budget() -> None:
    assert first(kept("stepwell-tokens")).met is True
    for worse in ({"bytes_cold_to_hot": 26}, {"kl_mean": 0.011}, {"field_difference": -0.011}):
        assert first(kept("stepwell-tokens", **worse)).met is False, worse
    far = kept("stepwell-tokens", bytes_cold_to_hot=5, kl_mean=0.02)
    dear = kept("stepwell-tokens", bytes_cold_to_hot=50, budget=0.25)
    found = list(anchors.traffic([far, dear], "stepwell-tokens", anchors.HOST))
    assert found[0].measured is not None
    assert (found[0].measured.value, found[0].met) == (10.0, False), "bytes of one budget, nearness of another"
    assert {row.met for row in found[1:]} == {None} and len(found) == 7


def test_few_digits_judge_nothing() -> None:
    assert first(kept("stepwell-tokens", digits=999)).met is None
    assert first(kept("stepwell-tokens", task="nat", digits=0, field_difference=-0.2)).met is True, "no facts"


def test_pages_on_disk_need_most_of_the_prompt_to_be_cold() -> None:
    full = kept("full", hot_bytes=1050)  # of 2048 tokens and 102.4 more
    assert first(kept("stepwell-tokens", hot_bytes=500), full, hot=0.5).met is True
    assert first(kept("stepwell-tokens", hot_bytes=501), full, hot=0.5).met is False
    assert first(kept("stepwell-tokens", hot_bytes=500), hot=0.5).met is None, "nothing tells what the prompt's KV is"


def test_more_room_on_the_fast_tier_is_no_equal_comparison() -> None:
    yakv = kept("yakv", kl_mean=0.1, field_difference=-0.2)
    for hot, met in ((109, True), (111, None)):
        rows = list(anchors.at_equal_bytes([yakv, kept("stepwell-tokens", hot_bytes=hot)]))
        assert [row.met for row in rows] == [met, met]
        assert "x its room on the fast tier" in rows[0].beside


def test_far_fewer_bytes_are_no_equal_comparison_either() -> None:
    yakv = kept("yakv", kl_mean=0.1, field_difference=-0.2, bytes_cold_to_hot=100)
    for nbytes, met in ((80, True), (79, None)):
        rows = list(anchors.at_equal_bytes([yakv, kept("stepwell-tokens", bytes_cold_to_hot=nbytes)]))
        assert [row.met for row in rows] == [met, met]


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
        kept("stepwell-tokens", budget=0.2, bytes_cold_to_hot=19, kl_mean=0.0, field_difference=0.0, hot_bytes=200),
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
    rows += [kept("stepwell-tokens", task=task, kl_mean=0.09, bytes_cold_to_hot=20) for task in gaps]
    found = list(anchors.at_equal_bytes(rows))
    assert [(row.what[0], row.met) for row in found[::2]] == [("b", True), ("c", True), ("a", None)]
    assert [row.met for row in found[1::2]] == [False, False, None]
    assert not list(anchors.at_equal_bytes(rows[:3])), "nothing of ours: nothing is said"
