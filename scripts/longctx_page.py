"""The results and curves of docs/longctx.md, from benchmarks/results/longctx-*.json and fidelity*.json.

python scripts/longctx_page.py          writes page and curves anew
python scripts/longctx_page.py --check  says if they are not what they would be
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from lab.bench.longctx.anchors import published as anchors
from lab.bench.report import Result, as_dict
from stepwell.fidelity.results.plots import COLOURS, PlotLine, PlotMark, chart

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, CURVES = ROOT / "benchmarks/results", ROOT / "docs/longctx.md", ROOT / "docs/longctx.svg"
BEGIN, END = "<!-- results: made by scripts/longctx_page.py -->", "<!-- end of results -->"
BENCHMARKS = ("exact", "verified", "overhead", "pipeline", "hits", "predicted", "near", "beyond")
CURVE_TASK = "kvtable"
TABLES = {
    "fidelity": "Every policy on the tasks that need many facts",
    "fidelity-suite": "Ours on the other tasks",
    "fidelity-yakv": "Ours and YAKV's at small budgets",
    "fidelity-disk": "Cold pages on disk, in extents of a page with all KV heads",
}
RENAMED = {"stepwell bench fidelity": "stepwell fidelity", "python -m stepwell.bench": "python -m lab.bench"}
"""Commands as results have them, and as they are run now."""

Kept = dict[str, Any]


def page() -> str:
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    kept = {name: one for name, one in found.items() if not one.get("quick")}  # shows that it runs, measures nothing
    lines = ["## Measured", ""]
    lines += judged([kept[f"longctx-{name}"] for name in BENCHMARKS if f"longctx-{name}" in kept], anchored(kept))
    if any(name in kept for name in TABLES):
        lines += [
            "Policies beside full attention, teacher-forced on the same prefilled context. *x fewer bytes*: fetching "
            "all cold keys and values in fp16 in each step, over what the ledger says came up, scales included.",
            "",
        ]
    for name, title in TABLES.items():
        lines += accuracy(title, kept[name]) if name in kept else []
    if "fidelity-curves" in kept:
        lines += [
            "Quality against bytes, as curves over budgets (one task; papers' policies are reproductions):",
            "",
            "![accuracy and KL against bytes](longctx.svg)",
            "",
        ]
    if len(lines) == 2:
        lines += [
            "No full run is kept yet: `stepwell fidelity` and `python -m lab.bench.longctx` make them.",
            "",
        ]
    return "\n".join([BEGIN, *lines, END])


def anchored(kept: Kept) -> list[Kept]:
    """What is judged from the tables."""
    of = {name: kept[name]["rows"] if name in kept else [] for name in TABLES}
    rows = [
        *anchors.traffic([*of["fidelity"], *of["fidelity-suite"]], anchors.TOKENS, anchors.HOST),
        *anchors.traffic(of["fidelity-disk"], anchors.PAGES, anchors.DISK, anchors.HOT_SHARE),
        *anchors.at_equal_bytes([*of["fidelity"], *of["fidelity-yakv"]]),
    ]
    found: list[Kept] = as_dict(Result("", rows))["rows"]
    return found


def accuracy(title: str, kept: Kept) -> list[str]:
    lines = [
        f"### {title}",
        "",
        "| task | policy | granularity | facts right (95 %) | full | KL (95 %) | x fewer bytes | index | hot |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = kept["rows"]
    several = len({(row["tokens"], row["tier"]) for row in rows}) > 1
    for row in rows:
        fewer = row["bytes_all_fp16"] / row["bytes_cold_to_hot"] if row["bytes_cold_to_hot"] else None
        lines.append(
            f"| {_task(row, several)} | {row['policy']} {100 * row['budget']:g} % | {row['granularity']} | "
            f"{row['field_accuracy']:.3f} ({_ends(row['field_accuracy_ci'])}) | {row['full_field_accuracy']:.3f} | "
            f"{row['kl_mean']:.4f} ({_ends(row['kl_mean_ci'], 4)}) | {f'{fewer:.1f}' if fewer else '-'} | "
            f"{row['index_bytes'] / 2**20:.1f} MiB | {row['hot_bytes'] / 2**20:.1f} MiB |"
        )
    tiers = _all(row["tier"] for row in rows)
    lengths = _all(f"{tokens:,}" for tokens in sorted({row["tokens"] for row in rows}))
    digits = {_task(row, several): row["digits"] for row in rows}
    told = ", ".join(f"{task} {count:,}" for task, count in digits.items() if count)
    return [
        *lines,
        "",
        f"{kept['model']}, prompts of {lengths} tokens, tier {tiers}; tokens of facts: {told}. {_facts(kept)}",
        "",
    ]


def judged(results: list[Kept], others: list[Kept]) -> list[str]:
    if not results and not others:
        return []
    rows = [*(row for result in results for row in result["rows"]), *others]
    head = ["| | target | measured | | |", "|---|---|---|---|---|"]
    lines = ["### Promised and reached", "", *head, *(_line(row) for row in rows if row["target"]), ""]
    names = {f"longctx-{name}" for name in BENCHMARKS} - {result["benchmark"] for result in results}
    if names:
        lines += [f"Not measured yet: {', '.join(sorted(names))}.", ""]
    lines += ["<details><summary>All rows</summary>", "", *head, *map(_line, rows), "", "</details>"]
    for result in results:
        lines += ["", f"`{result['benchmark']}`: {result['remarks'][0]}. {_facts(result)}"]
    return [*lines, ""]


def _task(row: Kept, several: bool) -> str:
    """With what else tells rows apart, where that is not the same for all of them."""
    return f"{row['task']}, {row['tokens']:,}, {row['tier']}" if several else str(row["task"])


def _all(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _line(row: Kept) -> str:
    if row["measured"] is None:
        value, verdict, beside = "not measured", row["beside"], ""
    else:
        value = f"{_short(row['measured'])} {row['unit']}".strip() + _interval(row)
        verdict, beside = {True: "met", False: "**missed**", None: ""}[row["met"]], row["beside"]
    what = row["what"].strip().replace("|", "\\|")  # max |difference| is no cell's end
    indent = "&emsp;" if row["what"].startswith(" ") else ""
    return f"| {indent}{what} | {row['target'] or ''} | {value} | {verdict} | {beside} |"


def curves(rows: list[Kept]) -> str:
    rows = [row for row in rows if row["task"] == CURVE_TASK]
    names = list(dict.fromkeys(f"{row['policy']}, {row['granularity']}" for row in rows))
    label = "share of all cold bytes that was fetched"
    charts = []
    for title, value, ends in (
        (f"{CURVE_TASK}: accuracy of facts", "field_accuracy", "field_accuracy_ci"),
        (f"{CURVE_TASK}: KL to full attention", "kl_mean", "kl_mean_ci"),
    ):
        lines = []
        for name in names:
            some = [row for row in rows if f"{row['policy']}, {row['granularity']}" == name]
            marks = [
                PlotMark(row["bytes_cold_to_hot"] / max(row["bytes_all_fp16"], 1), row[value], *row[ends])
                for row in some
            ]
            lines.append(PlotLine(name, marks, level=some[0]["policy"] == "full"))
        charts.append(chart(title, label, title.split(": ")[1], lines))
    placed = [f'<g transform="translate({480 * at},60)">{one}</g>' for at, one in enumerate(charts)]
    keys = "".join(
        f'<text x="{20 + 230 * (at % 4)}" y="{18 + 18 * (at // 4)}" fill="{colour}">&#9632; {name}</text>'
        for at, (name, colour) in enumerate(zip(names, cycle(COLOURS), strict=False))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="370" font-family="sans-serif" font-size="12">'
        f"{keys}{''.join(placed)}</svg>\n"
    )


def _facts(kept: Kept) -> str:
    facts = kept.get("machine") or kept.get("facts") or {}
    revision = (facts.get("revision") or "outside of git")[:7]
    load = (facts.get("load_average") or facts.get("load_average_before") or [0.0])[0]
    command = kept.get("command") or facts.get("command", "")
    for old, new in RENAMED.items():
        command = command.replace(old, new)
    return f"`{command}` at {revision}, {facts.get('cores', '?')} shared cores, load {load:.1f}."


def _interval(row: Kept) -> str:
    low, high = row["interval"]
    return f" ({_short(low)} to {_short(high)})" if low < high else ""


def _ends(ends: list[float], places: int = 3) -> str:
    return f"{ends[0]:.{places}f} to {ends[1]:.{places}f}"


def _short(value: float) -> str:
    if float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def main() -> int:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    new = before + page() + rest.split(END, 1)[1]
    drawn = RESULTS / "fidelity-curves.json"
    picture = curves(json.loads(drawn.read_text())["rows"]) if drawn.exists() else None
    if "--check" not in sys.argv:
        PAGE.write_text(new)
        if picture is not None:
            CURVES.write_text(picture)
        return 0
    if new != text or (picture is not None and picture != CURVES.read_text()):
        print("docs/longctx.md is not what benchmarks/results says: run scripts/longctx_page.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
