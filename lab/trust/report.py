"""What was tried and what broke: a table for people, and `trust.json`."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec

from stepwell.ops.machine import Facts


@dataclass(frozen=True, slots=True)
class Row:
    """`cases` that were tried, `violations` of the promise among them. `remark` says what a case is, and what could not
    be tried here and why; `evidence` describes the first violations so that they can be tried again. A row of a peer is
    a `comparison`: its violations are no failure of ours."""

    promise: str
    cases: int
    violations: int
    seed: int
    remark: str = ""
    evidence: Sequence[str] = field(default_factory=tuple)
    comparison: bool = False


def ended_by(error: Exception) -> str:
    """Evidence that a campaign, or a part of it, did not come to its end; where it was is printed."""
    traceback.print_exception(error)
    return f"the rest was not tried: {type(error).__name__}: {error}"


def table(rows: Sequence[Row]) -> str:
    """Four columns, what the cases of a row were below it, and in the end what broke and how to try it again."""
    width = max(len("promise"), *(len(row.promise) for row in rows))
    text = [f"{'promise':{width}}  {'cases':>10}  {'violations':>10}  {'seed':>10}"]
    for row in rows:
        text.append(f"{row.promise:{width}}  {row.cases:>10,}  {row.violations:>10,}  {row.seed:>10}")
        text += [f"    {line}" for line in wrap(row.remark, width + 32)]
    text += [f"{'of a peer' if row.comparison else 'BROKEN'}: {row.promise}: {e}" for row in rows for e in row.evidence]
    ours = [row for row in rows if not row.comparison]
    text.append(f"{len(ours)} promises, {sum(row.cases for row in ours):,} cases, {broken(rows):,} violations")
    return "\n".join(text)


def save(rows: Sequence[Row], path: Path, machine: Facts, *, command: str) -> None:
    """Writes `path`, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"command": command, "rows": [asdict(row) for row in rows], "machine": machine}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def broken(rows: Sequence[Row]) -> int:
    """Violations of our own promises."""
    return sum(row.violations for row in rows if not row.comparison)
