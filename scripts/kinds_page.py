"""Writes the table of model families into docs/vllm.md, from tests/engines/vllm/kinds.toml; `--check` says whether it
is the same."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLE = ROOT / "docs/vllm.md", ROOT / "tests/engines/vllm/kinds.toml"
BEGIN, END = "<!-- families: made by scripts/kinds_page.py -->", "<!-- end of families -->"


def table() -> str:
    rows: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["row"]
    lines = ["| family | keeps | stepwell | shown by |", "|---|---|---|---|"]
    for row in rows:
        architectures = ", ".join(f"`{name}`" for name in row["architectures"].split())
        family = f"{row['family']} ({architectures})" if architectures else row["family"]
        does = f"inert, {row['code']}" if "code" in row else "served"
        if "note" in row:
            does += f". {row['note']}"
        lines.append(f"| {family} | {row['keeps']} | {does} | {_shown(row)} |")
    return "\n".join([BEGIN, "", *lines, "", END])


def _shown(row: dict[str, Any]) -> str:
    if "code" in row:
        return "its refusal: [test_kinds](../tests/engines/vllm/test_kinds.py)"
    if "alike" in row:
        return f"not run; its cache is like that of {row['alike']}"
    if "tests" not in row:
        return "not run: no recall of it has been seen"
    return ", ".join(f"{_where(node)}: {_link(node)}" for node in row["tests"])


def _where(node: str) -> str:
    return "real engine" if node.startswith("e2e/") else "vLLM's scheduler, without a model"


def _link(node: str) -> str:
    file, _, function = node.partition("::")
    kind = function.rstrip("]").partition("[")[2]
    name = Path(file).stem
    return f"[{f'{name}, {kind}' if kind else name}](../tests/{file})"


def main() -> int:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    new = before + table() + rest.split(END)[1]
    if "--check" in sys.argv:
        if new != text:
            print("the families in docs/vllm.md are not those of the table: run scripts/kinds_page.py")
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
