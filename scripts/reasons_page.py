"""Writes the tables of reasons in docs/troubleshooting.md from the code; `--check` says whether it is the same."""

from __future__ import annotations

import sys
from pathlib import Path

from stepwell.cli.reasons import BY_ENGINE, BY_SPILL, BY_WELL, Reason

PAGE = Path(__file__).resolve().parents[1] / "docs/troubleshooting.md"
WELL = "<!-- reasons of the well: made by scripts/reasons_page.py -->"
ENGINE = "<!-- reasons of engines: made by scripts/reasons_page.py -->"
SPILL = "<!-- reasons of no spill: made by scripts/reasons_page.py -->"
END = "<!-- end -->"


def table(reasons: tuple[Reason, ...]) -> str:
    rows = [f"| `{reason.name}` | {reason.meaning} | {reason.advice} |" for reason in reasons]
    return "\n".join(["| reason | meaning | what to do |", "|---|---|---|", *rows])


def page(text: str) -> str:
    for mark, reasons in ((WELL, BY_WELL), (ENGINE, BY_ENGINE), (SPILL, BY_SPILL)):
        before, rest = text.split(mark)
        text = f"{before}{mark}\n{table(reasons)}\n{END}{rest.split(END, 1)[1]}"
    return text


def main() -> int:
    text = PAGE.read_text()
    new = page(text)
    if "--check" in sys.argv:
        if new != text:
            print("docs/troubleshooting.md has other reasons than the code: run scripts/reasons_page.py")
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
