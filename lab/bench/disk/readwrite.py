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

from lab.bench.disk.beside import BareSide, WellSide, Window, well_side
from lab.bench.report import Result, Row, Target
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


FULL, QUICK = Size(16, 2.0), Size(1, 0.5)


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
            rate = FULL_LOAD * most if load == 1 else load * most
            ours[load].append(well.window(rate, size.seconds))
            theirs[load].append(bare.window(ours[load][-1].rate if load else 0.0, size.seconds))
    rows = [row for load in LOADS for row in _rows(load, ours[load], theirs[load])]
    speed = stats.median([window.rate / 1e6 for window in alone])
    rows.append(Row("written with nobody reading", "MB/s", speed))
    kept = stats.ratio_of_paired_means([(o.rate, a.rate) for o, a in zip(ours[1.0], alone, strict=True)])
    rows.append(Row("written at full load beside reads / with nobody reading", "", kept))
    counts = {
        "windows": 2 * size.repetitions * len(LOADS),
        "reads": sum(len(w.reads) for windows in (*ours.values(), *theirs.values()) for w in windows),
        "gone": sum(w.gone for windows in ours.values() for w in windows),
    }
    return Result("readwrite", rows, counts)


def _rows(load: float, ours: list[Window], theirs: list[Window]) -> list[Row]:
    name = f"{load:.0%} of what the well writes"
    recalls = [seconds for window in ours for seconds in window.reads]
    bare = [seconds for window in theirs for seconds in window.reads]
    opened = [seconds for window in theirs for seconds in window.opened]
    rows = []
    for percent in (50, 99):
        target = Target("<=", LIMIT) if (load, percent) == (1.0, 99) else None
        rows.append(Row(f"{name}: p{percent} of a recall", "ms", stats.percentile(recalls, percent).times(1e3)))
        for what, base in (("a bare read", bare), ("a bare read that opens", opened)):
            own = stats.percentile(base, percent).times(1e3)
            beside = f"of {own.value:.2f} ({own.low:.2f} to {own.high:.2f}) ms"
            rows.append(Row(f"  / {what}", "", stats.ratio_of_percentiles(recalls, base, percent), target, beside))
    wrote = [stats.median([window.rate / 1e6 for window in windows]) for windows in (ours, theirs)]
    rows.append(Row("  written", "MB/s", wrote[0], beside=f"bare {wrote[1].value:.0f}"))
    return rows
