"""The disk tier's index at ten million blocks: memory a block, and what each call costs.

All happens in a process of its own (`python -m lab.bench.disk.index BLOCKS`), so that its growth is the index's. It is
filled segment by segment, three of four one block at a time as a busy tier does, the fourth in one call as recovery
does; memory is looked at after each, since it costs most right after the table has begun to grow. Nothing here waits,
so times are the thread's own processor time. Even that has outliers that are the machine's: beside the longest put
stands the longest run of a fixed piece of Python at the same moments.
"""

from __future__ import annotations

import gc
import json
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate
from stepwell.tiers.disk.index import BlockIndex

FULL, QUICK = 10_000_000, 100_000
SEGMENT_BLOCKS = 500
LARGE_SEGMENT_BLOCKS = 30_000
_DESIGNED_FOR = 60_000_000
_FINDS = 1000  # in one sample
_WARM = 2000  # blocks in an index that is thrown away, so that code and buffers are not counted

Samples = dict[str, list[float]]


def run(quick: bool) -> Result:
    blocks = QUICK if quick else FULL
    command = [sys.executable, "-m", "lab.bench.disk.index", str(blocks)]
    found: Samples = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return Result("index", rows(found), {"blocks": blocks, "segments": int(found["segments"][0])}, [remark(found)])


def rows(found: Samples) -> list[Row]:
    worst = max(found["worst_counted"][0], found["worst_grown"][0])
    fixed = stats.median(found["fixed"]).value * 1e3
    return [
        Row("memory a block, as counted by the index", "B", _one(found["counted"][0]), Target("<=", 64.0)),
        Row("memory a block, by which the process grew", "B", _one(found["grown"][0]), Target("<=", 64.0)),
        Row("  as counted, at its worst from a tenth on", "B", _one(found["worst_counted"][0]), Target("<=", 64.0)),
        Row("  the process, at its worst from a tenth on", "B", _one(found["worst_grown"][0]), Target("<=", 64.0)),
        Row(
            "60 M blocks at the worst of these, computed",
            "GiB",
            _one(worst * _DESIGNED_FOR / 2**30),
            beside="not measured: the cost of a block does not depend on their number",
        ),
        Row("find, of a block that is here", "us", _micro(found["hit"]), Target("<=", 1.5)),
        Row("find, of one that is not", "us", _micro(found["miss"])),
        Row("put", "us", _micro(found["put"])),
        Row(
            f"  the longest of {SEGMENT_BLOCKS} puts, 99th percentile",
            "ms",
            stats.percentile(found["longest_put"], 99).times(1e3),
            Target("<=", 1.0),
        ),
        Row("  the longest of all", "ms", _longest(found["longest_put"])),
        Row(f"  a fixed piece of Python of {fixed:.2f} ms, the longest", "ms", _longest(found["longest_fixed"])),
        Row(f"put_many of {SEGMENT_BLOCKS}, a block", "us", _micro(found["put_many"])),
        Row(f"put_many of {LARGE_SEGMENT_BLOCKS:,}, a block", "us", _micro(found["put_many_large"])),
        Row(f"drop_segment of {SEGMENT_BLOCKS}, a block", "us", _micro(found["drop"])),
        Row(f"drop_segment of {LARGE_SEGMENT_BLOCKS:,}, a block", "us", _micro(found["drop_large"])),
    ]


def remark(found: Samples) -> str:
    count = len(found["put_many"])
    mean = sum(found["put_many"]) / count * 1e6
    return (
        f"put_many of {SEGMENT_BLOCKS}: {mean:.2f} us a block on average of {count} calls, those that moved a part of "
        f"the table among them: {1 / mean:.1f} M blocks a second"
    )


def _one(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _micro(seconds: list[float]) -> Estimate:
    return stats.median(seconds).times(1e6)


def _longest(seconds: list[float]) -> Estimate:
    """Of the longest of all there is no interval; `seconds`: the longest of each segment."""
    longest = max(seconds) * 1e3
    return Estimate(longest, longest, longest, len(seconds))


# --- in a process of its own ------------------------------------------------------------------------------------------


def measure(blocks: int) -> Samples:
    """Seconds a block (of one call, for `longest_` and `fixed`), and bytes a block."""
    gc.disable()
    _fill(_WARM, {}, 0)
    found: Samples = {"worst_counted": [0.0], "worst_grown": [0.0]}
    before = _resident()
    index, segments = _fill(blocks, found, before)
    found["segments"] = [float(segments)]
    found["counted"] = [index.nbytes / len(index)]
    found["grown"] = [(_resident() - before) / len(index)]
    source = random.Random(1)
    here = [bytes(row) for segment in source.sample(range(segments), min(segments, 400)) for row in _ids(segment)[:50]]
    found["hit"] = _finds(index, here, source)
    found["miss"] = _finds(index, [source.randbytes(32) for _ in here], source)
    found["drop"] = [
        _timed(index.drop_segment, segment) / SEGMENT_BLOCKS
        for segment in source.sample(range(segments), min(segments // 2, 200))
    ]
    large = range(segments, segments + 5)
    pages = np.arange(LARGE_SEGMENT_BLOCKS, dtype=np.uint32)
    found["put_many_large"], found["drop_large"] = [], []
    for segment in large:
        ids = _ids(segment, LARGE_SEGMENT_BLOCKS)
        took = _timed(index.put_many, ids, segment, pages)
        found["put_many_large"].append(took / LARGE_SEGMENT_BLOCKS)
    for segment in large:
        found["drop_large"].append(_timed(index.drop_segment, segment) / LARGE_SEGMENT_BLOCKS)
    return found


def _fill(blocks: int, found: Samples, before: int) -> tuple[BlockIndex, int]:
    """An index of so many blocks and the number of its segments."""
    index, segment = BlockIndex(2 * blocks + 5 * LARGE_SEGMENT_BLOCKS), 0
    pages = np.arange(SEGMENT_BLOCKS, dtype=np.uint32)
    samples: Samples = {name: [] for name in ("put", "put_many", "longest_put", "longest_fixed", "fixed")}
    worst_counted = worst_grown = 0.0
    while len(index) < blocks:
        ids = _ids(segment)
        if segment % 4 == 0:
            took = _timed(index.put_many, ids, segment, pages)
            samples["put_many"].append(took / SEGMENT_BLOCKS)
        elif segment % 4 == 1:
            samples["longest_put"].append(
                max(_timed(index.put, bytes(row), segment, page) for page, row in enumerate(ids))
            )
            fixed = [_timed(_fixed) for _ in range(8)]  # as many as puts of 500 move a slice, while the table grows
            samples["longest_fixed"].append(max(fixed))
            samples["fixed"].append(fixed[0])
        else:
            as_bytes = [bytes(row) for row in ids]
            samples["put"].append(_timed(_puts, index, as_bytes, segment) / SEGMENT_BLOCKS)
        if len(index) >= blocks // 10:
            worst_counted = max(worst_counted, index.nbytes / len(index))
            worst_grown = max(worst_grown, (_resident() - before) / len(index))
        segment += 1
    found.update(samples, worst_counted=[worst_counted], worst_grown=[worst_grown])
    return index, segment


def _ids(segment: int, count: int = SEGMENT_BLOCKS) -> npt.NDArray[np.uint8]:
    """A segment's ids, the same each time: keeping them would cost more memory than the index."""
    return np.random.default_rng(segment).integers(0, 256, (count, 32), np.uint8)


def _puts(index: BlockIndex, ids: Iterable[bytes], segment: int) -> None:
    for page, block_id in enumerate(ids):
        index.put(block_id, segment, page)


def _fixed() -> int:
    return sum(range(7000))


def _finds(index: BlockIndex, ids: list[bytes], source: random.Random) -> list[float]:
    source.shuffle(ids)
    seconds = []
    for start in range(0, len(ids), _FINDS):
        part = ids[start : start + _FINDS]
        seconds.append(_timed(_find_all, index, part) / len(part))
    return seconds


def _find_all(index: BlockIndex, ids: list[bytes]) -> None:
    for block_id in ids:
        index.find(block_id, True)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    began = time.thread_time_ns()
    call(*arguments)
    return (time.thread_time_ns() - began) / 1e9


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
