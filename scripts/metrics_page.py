"""Writes the tables of docs/metrics.md from the code; `--check` says whether they are the same."""

from __future__ import annotations

import sys
from pathlib import Path

from stepwell import renamed
from stepwell.engines.common.counts import FAMILIES
from stepwell.serve.metrics.table import METRICS

ROOT = Path(__file__).resolve().parents[1]
WELL = "<!-- the well's metrics: made by scripts/metrics_page.py -->"
ENGINE = "<!-- the engine's metrics: made by scripts/metrics_page.py -->"
RENAMED = "<!-- renamed metrics: made by scripts/metrics_page.py -->"
END = "<!-- end -->"


def table(rows: list[tuple[str, str, list[str], str]]) -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, meaning in rows:
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    return "\n".join(lines)


def page(text: str) -> str:
    well = [(m.name, m.kind, m.labels, m.help) for m in METRICS]
    engine = [(f"{f.name}_total", "counter", [f.label] if f.label else [], f.help) for f in FAMILIES.values()]
    names = "\n".join(f"| `{old}` | `{new}` |" for old, new in renamed.METRICS.items())
    for mark, made in (
        (WELL, table(well)),
        (ENGINE, table(engine)),
        (RENAMED, f"| old name | new name |\n|---|---|\n{names}"),
    ):
        before, rest = text.split(mark)
        text = f"{before}{mark}\n{made}\n{END}{rest.split(END, 1)[1]}"
    return text


def main() -> int:
    path = ROOT / "docs/metrics.md"
    text = path.read_text()
    new = page(text)
    if "--check" in sys.argv:
        if new != text:
            print("docs/metrics.md is not what the code serves: run scripts/metrics_page.py")
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
