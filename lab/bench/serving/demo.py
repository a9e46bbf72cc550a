"""The demo's run, kept with the machine's facts: the README's table is made of it (`scripts/results_table.py`)."""

from __future__ import annotations

from lab.bench.report import Result, Row, Target
from stepwell.demo.results.result import DemoResult
from stepwell.demo.results.stats import Estimate
from stepwell.demo.run import DemoOptions
from stepwell.demo.run import run as run_demo


def run(quick: bool) -> Result:
    result = run_demo(DemoOptions(documents=3, rounds=1) if quick else DemoOptions())
    rows = [
        Row("cold: everything computed", "s", _plain(result.cold_ttft_s, result.documents)),
        Row("engine hit: asked again at once", "s", _plain(result.engine_hit_ttft_s, result.host_pairs)),
        Row("  speed-up over cold", "x", _plain(result.engine_hit_speedup, result.host_pairs)),
        Row("recalled from the host tier", "s", _plain(result.host_recall_ttft_s, result.host_pairs)),
        Row("  speed-up over cold", "x", _plain(result.host_speedup, result.host_pairs)),
        Row("  over its engine hit", "", _ratio(result.host_ratio, result.host_ratio_ci, result.host_pairs),
            Target("<=", 1.05)),
        Row("recalled by a new engine", "s", _plain(result.restart_recall_ttft_s, result.restart_pairs)),
        Row("  speed-up over cold", "x", _plain(result.restart_speedup, result.restart_pairs)),
        Row("  over its engine hit", "", _ratio(result.restart_ratio, result.restart_ratio_ci, result.restart_pairs),
            Target("<=", 1.05)),
        Row("recalled from disk, engine and well restarted", "s", _plain(result.disk_recall_ttft_s, result.disk_pairs)),
        Row("  speed-up over cold", "x", _plain(result.disk_speedup, result.disk_pairs)),
        Row("  over its engine hit", "", _ratio(result.disk_ratio, result.disk_ratio_ci, result.disk_pairs),
            Target("<=", 1.25)),
    ]  # fmt: skip
    return Result(
        "demo", rows, _counts(result), [f"{result.model}, {result.engine}, engine pages of {result.page} tokens"]
    )


def _counts(result: DemoResult) -> dict[str, int]:
    return {
        "documents": result.documents,
        "document_tokens": result.document_tokens,
        "pool_pages": result.pool_pages,
        "pairs": result.pairs,
        "dropped_pairs": result.dropped_pairs,
        "identical_answers": result.pairs if result.identical else 0,
        "recalled_tokens": result.recalled_tokens,
        "host_bytes": result.host_bytes or 0,
        "disk_bytes": result.disk_bytes or 0,
    }


def _plain(value: float | None, samples: int) -> Estimate | None:
    """A median whose interval the demo does not tell."""
    return None if value is None else Estimate(value, value, value, samples)


def _ratio(value: float | None, interval: tuple[float, float] | None, samples: int) -> Estimate | None:
    return None if value is None or interval is None else Estimate(value, interval[0], interval[1], samples)
