"""`python -m lab.trust [NAME ...] [--scale N] [--seed N] [--hours N] [--out FILE]`

One campaign after the other; the table at the end, and the record in FILE. Exits with 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab import FOLDER
from lab.bench.processes import end_orderly
from lab.trust import report
from lab.trust.budget import Budget
from stepwell.ops import machine

NAMES: tuple[str, ...] = (
    "format",
    "guards",
    "simulation",
    "tenants",
    "secrets",
    "canary",
    "kills",
    "devices",
    "powercut",
    "engine",
    "peer",
)
"""In this order: quick ones first."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no campaign is called {unknown[0]}; there are {', '.join(NAMES)}")
    if options.scale is not None and not 0 < options.scale <= 1:
        parser.error("--scale is a share of the full sizes, above 0 and at most 1")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    until = time.monotonic() + 3600 * options.hours
    budget = Budget(seed, options.scale, until)
    facts, began = machine.facts(FOLDER), time.monotonic()
    command = " ".join(["python -m lab.trust", *(sys.argv[1:] if arguments is None else arguments)])
    rows: list[report.Row] = []
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        start = time.monotonic()
        rows += _run(name, budget)
        budget.tell(f"{time.monotonic() - start:.0f} s")
        if options.out is not None:  # what is known is kept, whatever comes
            facts["seconds"] = round(time.monotonic() - began, 1)
            report.save(rows, options.out, facts, command=command)
    print(report.table(rows))
    if options.out is not None:
        print(f"kept in {options.out}")
    return 1 if report.broken(rows) else 0


def _run(name: str, budget: Budget) -> Iterator[report.Row]:
    """The campaign's rows. One that breaks down is a violation, and costs the others nothing."""
    try:
        yield from importlib.import_module(f"lab.trust.{name}").run(budget)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told and counted
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        yield report.Row(
            f"{name} runs to its end", 1, 1, budget.seed, "", [f"{type(error).__name__}: {error} ({where})"]
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.trust", description="tries to break stepwell's promises")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--scale", type=float, metavar="N", help="share of the full sizes (1: all); else those of CI")
    parser.add_argument("--seed", type=int, metavar="N", help="of the dice; else a new one, which the table names")
    parser.add_argument("--hours", type=float, default=24.0, metavar="N", help="end early after so long (24)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the record is kept")
    return parser


if __name__ == "__main__":
    end_orderly()
    raise SystemExit(main())
