"""Runs benchmarks one after the other, prints their tables and keeps them: what the programs of benchmarks share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lab import FOLDER
from lab.bench import report
from lab.bench.report import Result
from stepwell.demo.engine import EngineFailed
from stepwell.errors import StepwellError
from stepwell.ops import machine


def each(runs: Mapping[str, Callable[[], Result]], *, out: Path | None, command: str, quick: bool) -> bool:
    """By name; whether all of them could be run. `out`: where results are kept, None for nowhere."""
    complete = True
    for name, run in runs.items():
        facts, began = machine.facts(FOLDER), time.monotonic()
        try:
            result = run()
        except (StepwellError, EngineFailed, TimeoutError) as error:
            print(f"{name}: {error}\n", file=sys.stderr, flush=True)
            complete = False
            continue
        facts["seconds"] = round(time.monotonic() - began, 1)
        facts["load_average_after"] = machine.load_average()
        print(report.table(result), flush=True)
        if out is not None:
            report.save(result, out, facts, command=command, quick=quick)
            print(f"  kept in {out / result.name}.json")
        print(flush=True)
    return complete
