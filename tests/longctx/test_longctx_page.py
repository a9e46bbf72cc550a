"""The page of results says what was measured, what was missed, and what was not measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench import report
from lab.bench.report import Result, Row, Target
from stepwell.demo.results.stats import Estimate
from tests.longctx.test_anchors import kept


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = Path(__file__).parents[2] / "scripts/longctx_page.py"
    spec = importlib.util.spec_from_file_location("longctx_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def full(policy: str, **other: Any) -> dict[str, Any]:
    return kept(policy, field_accuracy=0.9, field_accuracy_ci=[0.8, 1.0], full_field_accuracy=0.95, **other)


def keep(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    facts = {"revision": "abcdef0123", "cores": 2, "load_average_before": [1.0], "command": "stepwell fidelity"}
    (folder / f"{name}.json").write_text(json.dumps({"model": "some model", "machine": facts, "rows": rows}))


def test_what_is_missed_and_what_is_not_measured_is_shown(script: Any, tmp_path: Path) -> None:
    rows = [
        Row("max |difference|", "", Estimate(0.5, 0.4, 0.6, 3), Target("<=", 0.1), "beside it"),
        Row("  told below", "ms", Estimate(7.0, 7.0, 7.0, 1)),
        Row("left out", "x", None, Target(">=", 2), "no time"),
    ]
    report.save(Result("longctx-exact", rows, remarks=["so"]), tmp_path, {}, command="it", quick=False)
    page = script.page()
    judged, everything = page.split("<details>")
    assert "| max \\|difference\\| | <= 0.1 | 0.500 (0.400 to 0.600) | **missed** | beside it |" in judged
    assert "| left out | >= 2 | not measured | no time |" in judged
    assert "told below" not in judged and "| &emsp;told below |  | 7 ms |" in everything
    assert "Not measured yet: longctx-beyond" in judged and "longctx-exact," not in judged


def test_quick_results_are_shown_to_nobody(script: Any, tmp_path: Path) -> None:
    report.save(Result("longctx-exact", [], remarks=["so"]), tmp_path, {}, command="it", quick=True)
    assert "No full run is kept yet" in script.page()


def test_rows_of_several_lengths_say_which(script: Any, tmp_path: Path) -> None:
    keep(tmp_path, "fidelity", full("stepwell"), full("recency"))
    assert "| kvtable | stepwell 12.5 % |" in script.page()
    keep(tmp_path, "fidelity", full("stepwell"), full("stepwell", tokens=8192, tier="disk"))
    page = script.page()
    assert "| kvtable, 2,048, host | stepwell" in page and "| kvtable, 8,192, disk | stepwell" in page
    assert "prompts of 2,048 and 8,192 tokens, tier host and disk" in page


def test_curves_are_of_one_task_and_every_policy_has_a_key(script: Any) -> None:
    rows = [full(f"policy-{number}") for number in range(12)] + [full("stranger", task="nat")]
    drawn = script.curves(rows)
    assert "policy-11, token" in drawn and "stranger" not in drawn
    assert drawn.count("&#9632;") == 12
