"""Writes the README's results table from benchmarks/results/demo.json; `--check` says whether it is the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by scripts/results_table.py -->", "<!-- end of results -->"


def table(kept: dict[str, Any]) -> str:
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
        f"{kept['remarks'][0]}, bf16, one OpenMP thread, on {machine['cores']} shared cores ({machine['cpu']}, load "
        f"{machine['load_average'][0]:.1f}): {counts['documents']} documents,",
        f"{counts['document_tokens']} tokens in all, a pool for a quarter of them; {counts['identical_answers']} of "
        f"{counts['pairs']} answers identical to the engine hit's, {counts['dropped_pairs']} pairs dropped.",
        "A slow CPU flatters every speed-up over cold; the ratio to an engine hit is the one to look at.",
    ]
    return "\n".join([BEGIN, *lines, END])


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = before + table(json.loads((ROOT / "benchmarks/results/demo.json").read_text())) + after
    if "--check" in sys.argv:
        if new != text:
            print("README.md's table is not that of benchmarks/results/demo.json: run scripts/results_table.py")
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
