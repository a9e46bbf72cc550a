"""All measurements one after the other, each with a share of the time, printed and kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from lab import FOLDER
from lab.bench import report
from lab.bench.gpu import card, copies, interference, recall
from lab.bench.gpu.stage import Stage
from lab.bench.report import Result
from stepwell.ops import machine

NAMES = ("copies", "interference", "recall")
SHARES = {"copies": 0.3, "interference": 0.35, "recall": 1.0}
"""Of the time that is left when it begins."""


def run(
    names: Sequence[str], stage: Stage, *, out: Path | None, disk: Path | None, command: str
) -> tuple[list[Result], bool]:
    """The results, and whether all could be measured. `out`: where they are kept, None for nowhere. `disk`: a folder
    for the disk tier."""
    calls: dict[str, Callable[[Stage], Result]] = {
        "copies": copies.run,
        "interference": interference.run,
        "recall": partial(recall.run, folder=disk),
    }
    if stage.tiny:
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
    results: list[Result] = []
    for name in names:
        facts, began = machine.facts(FOLDER), time.monotonic()
        try:
            result = calls[name](stage.part(SHARES[name] if len(names) > 1 else 1.0))
        except Exception as error:  # noqa: BLE001 - whatever ends one of them, the GPU is at hand for the others now
            print(f"gpu-{name}: {type(error).__name__}: {error}\n", file=sys.stderr, flush=True)
            continue
        facts["gpu"] = card.facts()
        facts["seconds"] = round(time.monotonic() - began, 1)
        facts["load_average_after"] = machine.load_average()
        print(report.table(result), flush=True)
        if out is not None:
            print(f"  kept in {report.save(result, out, facts, command=command, quick=stage.quick or stage.tiny)}")
        print(flush=True)
        results.append(result)
    judged = [row for result in results for row in result.rows if row.target is not None]
    print(report.table(Result("what must be reached", judged)), flush=True)
    return results, len(results) == len(names)
