"""Sizes and tangles of the code, each held to a limit that may only fall: `[tool.stepwell.ratchet]` in pyproject.toml.

A number above its limit fails; one that has fallen by more than the limit's slack fails too, with the new limit to
write, so that what was won is kept. A limit is raised only together with a line beside it that says why.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "stepwell"
LAB = ROOT / "lab"
ABOVE_CORE = (
    "cli", "demo", "engines", "fidelity", "longctx", "ops", "plan", "serve", "simulate", "testing", "__main__.py",
)  # fmt: skip
LONG_FILE, FULL_FOLDER = 400, 12
SLACK = 0.02
"""Of a limit that counts lines: these change with every commit."""


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def product() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_lines() -> int:
    return sum(map(lines, product()))


def core_lines() -> int:
    """Of what the product's adapters, programs and apparatus stand on."""
    return sum(lines(path) for path in product() if part(path) not in ABOVE_CORE)


def lab() -> list[Path]:
    """The lab without its tests, which count as tests."""
    return [path for path in LAB.rglob("*.py") if LAB / "tests" not in path.parents]


def lab_lines() -> int:
    return sum(map(lines, lab()))


def test_lines() -> int:
    return sum(map(lines, (path for folder in (ROOT / "tests", LAB / "tests") for path in folder.rglob("*.py"))))


def long_files() -> int:
    return sum(lines(path) > LONG_FILE for path in product())


def full_folders() -> int:
    return sum(count > FULL_FOLDER for count in Counter(path.parent for path in (*product(), *lab())).values())


def circles() -> int:
    """Groups of modules that import each other in a ring, for types only or not."""
    graph = grimp.build_graph("stepwell", exclude_type_checking_imports=False, cache_dir=None)
    rings = set()
    for module in graph.modules:
        ring = graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        if ring:
            rings.add(frozenset(ring | {module}))
    return len(rings)


def callables_in_hierarchy() -> int:
    return sum(path.read_text(encoding="utf-8").count("Callable[") for path in (SOURCE / "hierarchy").rglob("*.py"))


def names_used_twice() -> int:
    """Public classes of the product that share their name with one in another of its files."""
    names: dict[str, set[Path]] = {}
    for path in product():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, set()).add(path)
    return sum(len(paths) > 1 for paths in names.values())


MEASURES: dict[str, tuple[str, Callable[[], int]]] = {
    "package_lines": ("lines of the package", package_lines),
    "core_lines": ("lines of its core", core_lines),
    "lab_lines": ("lines of the lab", lab_lines),
    "test_lines": ("lines of tests", test_lines),
    "long_files": (f"files of the product over {LONG_FILE} lines", long_files),
    "full_folders": (f"folders with more than {FULL_FOLDER} files", full_folders),
    "circles": ("rings of modules that import each other", circles),
    "callables_in_hierarchy": ("callables in the annotations of hierarchy", callables_in_hierarchy),
    "names_used_twice": ("class names used twice in the product", names_used_twice),
}


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["stepwell"]["ratchet"]
    if settings["limits"].keys() != MEASURES.keys() or settings["targets"].keys() != MEASURES.keys():
        print(f"pyproject.toml must have a limit and a target for each of {', '.join(MEASURES)}")
        return 1
    wrong: list[str] = []
    print(f"{'':48}{'today':>8}{'limit':>8}{'target':>8}")
    for name, (what, measure) in MEASURES.items():
        today, limit, target = measure(), settings["limits"][name], settings["targets"][name]
        print(f"{what:48}{today:8,}{limit:8,}{target:8,}")
        slack = round(limit * SLACK) if name.endswith("_lines") else 0
        if today > limit:
            wrong.append(f"{what}: {today:,} is over the limit of {limit:,}; say why beside a higher one")
        elif today < limit - slack:
            wrong.append(f'{what}: fallen to {today:,}; write "{name} = {today}" into pyproject.toml')
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
