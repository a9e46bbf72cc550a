"""The trust programme's frame: budgets, the table, the record, the exit status."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.trust import __main__ as program
from lab.trust.budget import Budget
from lab.trust.report import Row, broken, table


def test_sizes_follow_the_scale() -> None:
    assert Budget(1).of(ci=200, full=100_000) == 200
    assert Budget(1, scale=0.1).of(ci=200, full=100_000) == 10_000
    assert Budget(1, scale=0.1).of(ci=3, full=1) == 1
    assert Budget(1, until=0.0).over and not Budget(1).over


def test_dice_are_the_same_for_the_same_seed_and_names_only() -> None:
    draws = {Budget(seed).dice(*names).random() for seed in (1, 2) for names in (("a",), ("b",), ("a", 1), ("a", 2))}
    assert len(draws) == 8
    assert Budget(1).dice("a", 1).random() == Budget(1).dice("a", 1).random()


def test_a_peers_violations_are_no_failure_of_ours() -> None:
    rows = [Row("ours", 10, 0, 1), Row("a peer's", 10, 10, 1, comparison=True)]
    assert broken(rows) == 0
    assert broken([*rows, Row("ours too", 10, 2, 1)]) == 2


def test_the_table_says_what_broke_and_how_to_try_it_again() -> None:
    text = table([Row("never wrong", 1234, 1, 7, "flips", ["frame 3, bit 17"])])
    assert "never wrong" in text and "1,234" in text
    assert text.splitlines()[-2:] == ["BROKEN: never wrong: frame 3, bit 17", "1 promises, 1,234 cases, 1 violations"]


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A campaign whose rows the test sets."""
    rows: list[Row] = []

    def run(budget: Budget) -> Iterator[Row]:
        yield from rows

    module = types.ModuleType("lab.trust.made_up")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(program, "NAMES", ("made_up",))
    return rows


def test_the_record_has_all_rows_and_the_status_tells(campaign: list[Row], tmp_path: Path) -> None:
    out = tmp_path / "folder" / "trust.json"
    campaign.append(Row("never wrong", 10, 0, 7))
    assert program.main(["--seed", "7", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert [(r["promise"], r["cases"], r["violations"], r["seed"]) for r in kept["rows"]] == [("never wrong", 10, 0, 7)]
    assert kept["machine"]["cores"] >= 1
    assert kept["command"] == f"python -m lab.trust --seed 7 --out {out}"
    campaign.append(Row("never late", 10, 1, 7))
    assert program.main(["made_up", "--seed", "7"]) == 1


def test_a_campaign_that_breaks_down_is_a_violation_and_keeps_its_rows(
    campaign: list[Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(budget: Budget) -> Iterator[Row]:
        yield Row("never wrong", 10, 0, 7)
        raise ValueError("a bug of the campaign")

    monkeypatch.setattr(sys.modules["lab.trust.made_up"], "run", run)
    out = tmp_path / "trust.json"
    assert program.main(["--out", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["promise"], row["violations"]) for row in rows] == [
        ("never wrong", 0),
        ("made_up runs to its end", 1),
    ]
    assert "a bug of the campaign" in rows[1]["evidence"][0]


@pytest.mark.parametrize("arguments", [["nonsense"], ["--scale", "2"], ["--scale", "0"]])
def test_nonsense_is_refused(arguments: list[str], campaign: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert "error" in capsys.readouterr().err
