"""Reads before writes: how long one block takes from disk while the well writes, beside a bare reader beside as many
bare writes.

At each write load, a window of the well and one of bare files follow each other, again and again; the bare one writes
as many bytes a second as the well really wrote in its last window of that load. Full load is more than the well can
write. What the well writes with nobody reading is measured in between.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from lab.bench.disk.beside import BETWEEN_S, BLOCK, BareSide, WellSide, Window, well_side
from lab.bench.report import Result, Row, Target
from stepwell.block.layout import MiB
from stepwell.demo.model import cache_folder
from stepwell.demo.results import stats

LOADS = (0.0, 0.25, 0.5, 1.0)
FULL_LOAD = 1.1
"""Full load is this share of what the well writes with nobody reading, so that there is always more to write."""
ANY_DISK = 4e9
"""Bytes a second, more than the well can write here."""
LIMIT = 1.2


@dataclass(frozen=True, slots=True)
class Size:
    """`seconds` of one window."""

    repetitions: int
    seconds: float


FULL, QUICK = Size(12, 2.0), Size(1, 0.5)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    cache_folder().mkdir(parents=True, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="bench-readwrite-", dir=cache_folder()))
    try:
        (base / "bare").mkdir()
        bare = BareSide(base / "bare")
        try:
            with well_side(base / "disk") as well:
                return _measured(well, bare, size)
        finally:
            bare.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _measured(well: WellSide, bare: BareSide, size: Size) -> Result:
    well.fill(well.window(ANY_DISK, size.seconds, reading=False).rate / 2)
    most = well.window(ANY_DISK, 2 * size.seconds, reading=False).rate
    ours: dict[float, list[Window]] = defaultdict(list)
    theirs: dict[float, list[Window]] = defaultdict(list)
    alone: list[Window] = []
    for _ in range(size.repetitions):
        alone.append(well.window(FULL_LOAD * most, size.seconds, reading=False))
        for load in LOADS:
            ours[load].append(well.window(most * (FULL_LOAD if load == 1 else load), size.seconds))
            theirs[load].append(bare.window(ours[load][-1].rate if load else 0.0, size.seconds))
    rows = [row for load in LOADS for row in _rows(load, ours[load], theirs[load])]
    rows.append(Row("written with nobody reading", "MB/s", stats.median([window.rate / 1e6 for window in alone])))
    kept = stats.ratio_of_paired_means([(o.rate, a.rate) for o, a in zip(ours[1.0], alone, strict=True)])
    rows.append(Row("  at full load beside reads / that", "", kept))
    counts = {
        "windows_of_each_load": 2 * size.repetitions,
        "recalls": sum(len(window.reads) for windows in ours.values() for window in windows),
        "gone": sum(window.gone for windows in ours.values() for window in windows),
    }
    remarks = [
        f"one block of {BLOCK // MiB} MiB a read, {1000 * BETWEEN_S:.0f} ms between reads on average; windows of"
        f" {size.seconds:g} s; the bare system writes as many bytes a second as the well did at the same load"
    ]
    return Result("readwrite", rows, counts, remarks)


def _rows(load: float, ours: list[Window], theirs: list[Window]) -> list[Row]:
    recalls = [seconds for window in ours for seconds in window.reads]
    bare = [seconds for window in theirs for seconds in window.reads]
    opened = [seconds for window in theirs for seconds in window.opened]
    written = stats.median([window.rate / 1e6 for window in ours]).value
    rows = []
    for percent in (50, 99):
        target = Target("<=", LIMIT) if (load, percent) == (1.0, 99) else None
        recall_ms, bare_ms, opened_ms = (1e3 * stats.percentile(s, percent).value for s in (recalls, bare, opened))
        times = {"recall_ms": recall_ms, "bare_ms": bare_ms, "opened_ms": opened_ms}
        beside = f"{recall_ms:.2f} of {bare_ms:.2f} ms, {written:.0f} MB/s written"
        what, ratio = f"{load:.0%} write load: recall / bare read, p{percent}", stats.ratio_of_percentiles
        rows.append(Row(what, "", ratio(recalls, bare, percent), target, beside, {"written_mb_s": written, **times}))
        beside = f"of {opened_ms:.2f} ms"
        rows.append(Row("  / bare read that also opens", "", ratio(recalls, opened, percent), target, beside))
    return rows
