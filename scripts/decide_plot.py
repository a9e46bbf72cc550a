"""Draws docs/decide.svg from benchmarks/results/decide.json: seconds to first token by the speed of the tier, for each
mode and for vLLM alone. Needs matplotlib, which nothing else does."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOT = ROOT / "benchmarks/results/decide.json", ROOT / "docs/decide.svg"
POINT = re.compile(r"(?P<factor>[\d.]+) x break-even .*, (?P<together>\d) at a time")

Curves = dict[int, dict[str, list[tuple[float, dict[str, Any]]]]]
"""Prompts at a time, mode: (multiple of break-even, row)."""


def curves(rows: list[dict[str, Any]]) -> Curves:
    found: Curves = defaultdict(lambda: defaultdict(list))
    factor, together = 0.0, 0
    for row in rows:
        if point := POINT.match(row["what"]):
            factor, together = float(point["factor"]), int(point["together"])
        elif row["what"].startswith("  mean TTFT, "):
            found[together][row["what"].removeprefix("  mean TTFT, ")].append((factor, row))
    return found


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stepwell"
    from matplotlib import pyplot

    found = curves(json.loads(RESULTS.read_text())["rows"])
    figure, axes = pyplot.subplots(1, len(found), figsize=(4.5 * len(found), 3.2), squeeze=False)
    for axis, (together, modes) in zip(axes.flat, found.items(), strict=True):
        for mode, points in modes.items():
            factors = [factor for factor, _ in points]
            axis.plot(factors, [row["measured"] for _, row in points], label=mode, marker=".")
            low, high = zip(*(row["interval"] for _, row in points), strict=True)
            axis.fill_between(factors, low, high, alpha=0.12)
        axis.set(xscale="log", ylim=(0, None), xlabel="speed of the disk / break-even", title=f"{together} at a time")
        axis.set_ylabel("mean s to first token")
    axes.flat[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
