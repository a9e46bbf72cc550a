"""A benchmark's result: rows of target, measured value, interval and verdict; printed as a table, kept as JSON.

A row that misses its target stays a row. Rows without a target are there to be read, not judged.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepwell.demo.results.stats import Estimate
from stepwell.ops.machine import Facts

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True, slots=True)
class Target:
    """`bound` is in the row's unit, `relation` one of <=, < and >=."""

    relation: str
    bound: float

    def met(self, value: float) -> bool:
        return bool(_COMPARE[self.relation](value, self.bound))

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """`measured` None: it could not be measured here, and `beside` says why; else that says what helps to read it.
    `more`: further fields of the row in the file."""

    what: str
    unit: str
    measured: Estimate | None
    target: Target | None = None
    beside: str = ""
    more: Mapping[str, str | int | float | None] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None where there is nothing to judge."""
        if self.target is None or self.measured is None:
            return None
        return self.target.met(self.measured.value)


@dataclass(frozen=True, slots=True)
class Result:
    """`counts` say of how many samples the rows are, and how many were dropped; `remarks` are for people. `more`:
    further fields of the file."""

    name: str
    rows: Sequence[Row]
    counts: dict[str, int] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


def table(result: Result) -> str:
    """Plain text, as wide as its longest row."""
    head = ("", "target", "measured", "95 % interval", "", "")
    lines = [head, *(_cells(row) for row in result.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [f"{result.name}"]
    for line in lines:
        first, *numbers, verdict, beside = line
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))]
        text.append("  ".join([*cells, verdict.ljust(widths[-2]), beside]).rstrip())
    if result.counts:
        text.append("  " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in result.counts.items()))
    return "\n".join([*text, *(f"  {remark}" for remark in result.remarks)])


def _cells(row: Row) -> tuple[str, str, str, str, str, str]:
    target = f"{row.target} {row.unit}".rstrip() if row.target is not None else ""
    if row.measured is None:
        return row.what, target, "not measured", "", "", row.beside
    found = row.measured
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    interval = f"{_short(found.low)} to {_short(found.high)}"
    return row.what, target, f"{_short(found.value)} {row.unit}".rstrip(), interval, verdict, row.beside


def _short(value: float) -> str:
    """Three or four figures that matter."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def save(result: Result, folder: Path, machine: Facts, *, command: str, quick: bool) -> Path:
    """Writes `folder`/NAME.json, the folder with it; one result a file, the last run's."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    content = {"benchmark": result.name, "command": command, "quick": quick, **as_dict(result), "machine": machine}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return path


def as_dict(result: Result) -> dict[str, Any]:
    rows = []
    for row in result.rows:
        found = row.measured
        rows.append(
            {
                "what": row.what,
                "unit": row.unit,
                "target": str(row.target) if row.target is not None else None,
                "measured": found.value if found is not None else None,
                "interval": [found.low, found.high] if found is not None else None,
                "samples": found.count if found is not None else 0,
                "met": row.met,
                "beside": row.beside,
                **row.more,
            }
        )
    return {"rows": rows, "counts": result.counts, "remarks": list(result.remarks), **result.more}
