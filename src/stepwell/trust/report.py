"""What was tried and what broke: a table for people, and `trust.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepwell.bench.machine import Facts


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


def table(rows: Sequence[Row]) -> str:
    lines = [("promise", "cases", "violations", "seed", "")]
    lines += [(r.promise, f"{r.cases:,}", f"{r.violations:,}", str(r.seed), r.remark) for r in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:4], widths[1:], strict=True)), line[4]]
        )
        for line in lines
    ]
    evidence = [f"  {row.promise}: {what}" for row in rows for what in row.evidence]
    return "\n".join([*(line.rstrip() for line in text), *evidence])


def save(rows: Sequence[Row], path: Path, machine: Facts, *, command: str) -> None:
    """Writes `path`, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"command": command, "rows": [asdict(row) for row in rows], "machine": machine}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def broken(rows: Sequence[Row]) -> int:
    """Violations of our own promises."""
    return sum(row.violations for row in rows if not row.comparison)
