"""Constructed attention: one record is found by whoever looks, many are not, and the truth is where it was planted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.fidelity import indexes
from stepwell.fidelity.constructed import Construction, measure
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.index.landmark import MeanLandmark
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.index.rotated import RotatedKeys

KINDS = {"true": TrueKeys(), "centred": RotatedKeys(2), "plain": RotatedKeys(2, centred=False)}
PAGES = {"centred": RotatedKeys(2), "minmax": MinMax(), "mean": MeanLandmark()}
MADE = Construction(tokens=8192, dim=64, queries=10)


def recalls(made: Construction, kinds: dict[str, object], page_tokens: int, budget: float = 0.0625) -> dict[str, float]:
    return {one.index: one.recall.value for one in measure(made, kinds, page_tokens, [budget])}  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_numbers() -> None:
    first, second = (measure(MADE, KINDS, 16, [0.03, 0.1]) for _ in range(2))
    assert first == second
    assert measure(replace(MADE, seed=1, records=16), KINDS, 1, [0.03]) != measure(
        replace(MADE, records=16), KINDS, 1, [0.03]
    )


def test_one_record_is_found_by_all_but_large_blocks() -> None:
    assert set(recalls(MADE, KINDS, 1).values()) == {1.0}
    assert set(recalls(MADE, PAGES, 16).values()) == {1.0}
    large = recalls(replace(MADE, strength=6.0), PAGES, 128)
    assert large["centred"] == 1.0 and large["minmax"] < 0.9 and large["mean"] < 0.9


def test_many_records_tell_indexes_apart() -> None:
    many = replace(MADE, records=16)
    tokens, pages, blocks = recalls(many, KINDS, 1), recalls(many, PAGES, 16), recalls(many, PAGES, 128)
    assert tokens["true"] > tokens["centred"] > 0.5
    assert pages["centred"] > pages["mean"] + 0.1
    assert pages["centred"] > blocks["centred"] + 0.1 and blocks["centred"] > blocks["mean"] + 0.05


def test_centring_takes_outlier_channels_away() -> None:
    found = recalls(replace(MADE, records=16, outliers=20.0), KINDS, 1)
    assert found["centred"] > found["plain"] + 0.1
    assert found["true"] == recalls(replace(MADE, records=16), KINDS, 1)["true"]


def test_drift_costs_recall() -> None:
    many = replace(MADE, records=16)
    assert recalls(replace(many, drift=6.0), KINDS, 1)["true"] < recalls(many, KINDS, 1)["true"] - 0.02


def test_recall_is_all_at_a_budget_of_all() -> None:
    assert set(recalls(replace(MADE, records=32), PAGES, 16, budget=1.0).values()) == {1.0}


def test_bytes_are_of_keys_and_values() -> None:
    [found] = measure(MADE, {"true": TrueKeys()}, 16, [0.1])
    assert found.index_bytes == 8192 * 64 * 4 and found.bytes_all_fp16 == 8192 * 64 * 2 * 2
    told = found.plain()
    assert (told["task"], told["granularity"], told["budget"], told["needle_recall"]) == (
        "constructed", "page 16", 0.1, 1.0,
    )  # fmt: skip


def test_records_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        measure(replace(MADE, tokens=512, records=16), KINDS, 16, [0.1])


def test_the_command_compares_indexes() -> None:
    options = ["--lengths", "1K", "--records", "2", "--budgets", "6.25%", "--queries", "3"]
    done = CliRunner().invoke(app, ["indexes", *options, "--json"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    rows = json.loads(done.stdout)["rows"]
    kinds = sum(len(kinds) for kinds in indexes.KINDS.values())
    assert len(rows) == len(indexes.WORLDS) * kinds
    assert {row["index"] for row in rows} == {name for kinds in indexes.KINDS.values() for name in kinds}
    shown = CliRunner().invoke(app, ["indexes", *options])
    assert all(name in shown.stdout for name in indexes.WORLDS)


@pytest.mark.parametrize("option", [["--records", "0"], ["--records", "x"], ["--records", "9999"]])
def test_the_command_refuses_what_cannot_be(option: list[str]) -> None:
    done = CliRunner().invoke(app, ["indexes", "--lengths", "4K", *option])
    assert "SW-128" in str(done.exception)
