"""The tables and curves of docs/policies.md, from benchmarks/results/policies.json.

    python scripts/policies_page.py KEPT     takes over the rows of `stepwell simulate ... --keep KEPT`, and draws
    python scripts/policies_page.py          writes the page anew
    python scripts/policies_page.py --check  says if it is not what it would be

Curves need matplotlib, which nothing else does: without it they stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from stepwell.ops import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, CURVES = ROOT / "benchmarks/results/policies.json", ROOT / "docs/policies.md", ROOT / "docs/policies.svg"
BEGIN, END = "<!-- tables: made by scripts/policies_page.py -->", "<!-- end of tables -->"
RIVALS = ("lru", "arc", "s3fifo", "second_touch")
COMMAND = "stepwell simulate TRACE... --policy NAME,... --capacity-tokens 1%,2%,5%,10%,20%,50% --keep KEPT"

Row = dict[str, Any]
Table = dict[str, dict[float, dict[str, Row]]]
"""Trace, share of the working set, policy."""


def tables(kept: dict[str, Any]) -> str:
    found = _by_point(kept["rows"])
    lines, shares = [], []
    for trace, points in found.items():
        any_row = next(iter(next(iter(points.values())).values()))
        policies = list(next(iter(points.values())))
        lines += [
            f"### {trace}",
            "",
            f"{any_row['requests']:,} requests, {any_row['input_tokens'] / 1e6:,.1f} M tokens, "
            f"{any_row['working_set_tokens'] / 1e6:,.1f} M of them distinct; at best {any_row['ceiling_ratio']:.1%} "
            f"hit; {any_row['prefill_s']:,.0f} s of prefill ({any_row['cost']}). Seconds saved, and the hit ratio:",
            "",
            "| capacity | " + " | ".join(policies) + " | auto / LRU | auto / best |",
            "|---|" + "---|" * (len(policies) + 2),
        ]
        gained = possible = 0.0
        for share, point in points.items():
            saved = {name: row["saved_prefill_s"] for name, row in point.items()}
            best = max(saved[name] for name in RIVALS)
            gained, possible = gained + saved["auto"] - best, possible + saved["opt"] - best
            cells = [f"{row['saved_prefill_s']:,.0f} ({row['hit_tokens_ratio']:.1%})" for row in point.values()]
            ratios = [_ratio(saved["auto"], saved["lru"]), _ratio(saved["auto"], best)]
            lines.append(f"| {share:.0%} | " + " | ".join([*cells, *ratios]) + " |")
        shares.append(gained / possible if possible else 0.0)
        lines += ["", f"Of what `opt` saves beyond the best of the four, `auto` gets {shares[-1]:.1%}.", ""]
    facts = kept["machine"]
    lines += [
        f"On average over these traces: {sum(shares) / len(shares):.1%}.",
        "",
        f"`{kept['command']}` at {facts['revision'][:7]}, {facts['date'][:10]}. Speeds, in blocks asked for per "
        f"processor second, on a busy machine ({facts['cpu']}): " + _speeds(kept["rows"]) + ".",
    ]
    return "\n".join([BEGIN, "", *lines, "", END])


def _by_point(rows: list[Row]) -> Table:
    found: Table = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        share = round(row["capacity_tokens"] / row["working_set_tokens"], 2)
        found[row["trace"]][share][row["policy"]] = row
    return found


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.3f}" if theirs >= 1 else "-"


def _speeds(rows: list[Row]) -> str:
    by_policy: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_policy[row["policy"]].append(row["references_per_s"])
    return ", ".join(f"{name} {min(of):,} to {max(of):,}" for name, of in by_policy.items())


def draw(rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stepwell"
    from matplotlib import pyplot

    found = _by_point(rows)
    columns = 3
    height = -(-len(found) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(4 * columns, 2.8 * height), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (trace, points) in zip(axes.flat, found.items(), strict=False):
        for name in next(iter(points.values())):
            values = [at[name]["saved_prefill_s"] / at["opt"]["saved_prefill_s"] for at in points.values()]
            axis.plot(list(points), values, label=name, marker=".", linewidth=2 if name == "auto" else 1)
        axis.set(title=trace, xscale="log", ylim=(0, None), xlabel="capacity / working set", ylabel="saved / opt")
    axes.flat[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(CURVES, metadata={"Date": None})


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] != "--check":
        lines = Path(arguments[0]).read_text().splitlines()
        rows = [json.loads(line)["row"] for line in lines]
        kept = {"benchmark": "policies", "command": COMMAND, "rows": rows, "machine": machine.facts()}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        draw(rows)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    new = before + tables(json.loads(RESULTS.read_text())) + rest.split(END)[1]
    if "--check" not in arguments:
        PAGE.write_text(new)
    elif new != text:
        print("docs/policies.md is not what benchmarks/results/policies.json says: run scripts/policies_page.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
