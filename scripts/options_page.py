"""Writes docs/design/options.md from the table of engine options; `--check` says whether it is the same, and `--print`
prints the table as text."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLE = ROOT / "docs/design/options.md", ROOT / "tests/engines/vllm/options.toml"
CLASSES = {
    "identity": "engines that differ in it share no blocks",
    "served": "recalls are right whatever it says",
    "inert": "a value of it leaves the connector inert, with one message",
    "irrelevant": "it changes no KV of given tokens",
}
HEAD = """\
<!-- made by scripts/options_page.py -->

# What each option of vLLM is to stepwell

Every field that can be reached from `VllmConfig`, and every environment variable of vLLM, is one of four things:

"""
BETWEEN = """
The table is `tests/engines/vllm/options.toml`. `test_options.py` beside it compares it with the vLLM that is installed:
an option that is in no class fails the test. What is identity is changed on a real configuration, and its fact has to
change; what is irrelevant is changed, and no fact may; what is inert is set, and the connector has to refuse it with
that code; what is served names the test that recalls under it. A field that holds a whole part of the configuration
stands for all of that part where it is identity or inert.
"""


def entries() -> list[dict[str, Any]]:
    with TABLE.open("rb") as file:
        rows: list[dict[str, Any]] = tomllib.load(file)["row"]
    return rows


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(len(row["fields"].split()) for row in rows if row["class"] == name) for name in CLASSES}


def page() -> str:
    rows = entries()
    parts = [HEAD, "| class | meaning | options |\n|---|---|---|\n"]
    parts += [f"| {name} | {CLASSES[name]} | {count} |\n" for name, count in counts(rows).items()]
    parts.append(BETWEEN)
    for of in dict.fromkeys(row["of"] for row in rows):
        title = "Environment variables" if of == "environment" else f"`{of}`"
        parts.append(f"\n## {title}\n\n| options | class | by what, or why |\n|---|---|---|\n")
        parts += [f"| {_names(row)} | {row['class']} | {_reason(row, _test)} |\n" for row in rows if row["of"] == of]
    return "".join(parts)


def _names(row: dict[str, Any]) -> str:
    found = (field.partition("@")[::2] for field in row["fields"].split())
    return " ".join(f"`{name}`" + (f" ({version})" if version else "") for name, version in found)


def _reason(row: dict[str, Any], test: Any) -> str:
    fact = f"fact `{row['by']}`".replace("{field}", "*option*").replace("`*option*`", "*option*") if "by" in row else ""
    said = [fact, row.get("code", ""), row.get("why", ""), ", ".join(map(test, row.get("tests", ())))]
    text = "; ".join(part for part in said if part)
    return f"{text.rstrip('.')}. {row['note']}" if "note" in row else text


def _test(node: str) -> str:
    file, _, function = node.partition("::")
    return f"[{function}](../../tests/{file})"


def text() -> str:
    rows = entries()
    lines = [f"{count:4} {name}: {CLASSES[name]}" for name, count in counts(rows).items()]
    for row in rows:
        for field in row["fields"].split():
            lines.append(
                f"{row['class']:10} {row['of']}.{field}: {_reason(row, lambda node: node)}".replace("*option*", field)
            )
    return "\n".join(lines)


def main() -> int:
    if "--print" in sys.argv:
        print(text())
        return 0
    new = page()
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text() == new
        if not same:
            print("docs/design/options.md is not that of the table: run scripts/options_page.py")
        return int(not same)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
