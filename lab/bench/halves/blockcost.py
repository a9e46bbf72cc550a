"""What a block costs the well, by operation, and where its thread saturates.

Pretended engines without a model use a real well over its socket (`pressure`): lookups, recalls, misses and spills, of
prompts of 1K to 128K tokens in blocks of 16 to 128 tokens, with the policies that a well has by default. Processor time
of the well is what its threads spent, as the kernel counts it, over the blocks that it answered meanwhile: a number
that other work on the machine widens and hardly moves. Where the thread saturates is seen in a closed loop, as far as
the engines beside it leave it a processor; its share of one is beside each rate.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.bench import wells
from lab.bench.halves.pressure import Job, Window
from lab.bench.report import Result, Row
from stepwell.demo.results import stats

HOST = 512 << 20
"""131,072 blocks of the pretended engines: a minute of spilling fills it, so that what is spilled evicts."""

_BUSY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Size:
    """`prompts`: tokens of prompts, and tokens of their blocks. `engines`: so many of them saturate it together."""

    prompts: tuple[tuple[int, int], ...]
    engines: tuple[int, ...]
    windows: int
    window_s: float


FULL = Size(((1 << 10, 128), (8 << 10, 128), (32 << 10, 64), (128 << 10, 128), (128 << 10, 16)), (1, 4), 12, 0.5)
QUICK = Size(((1 << 10, 128), (8 << 10, 16)), (1,), 2, 0.2)

_PACE = {"lookup": 20_000, "recall": 10_000, "spill": 4_000, "miss": 200}
"""Blocks a second that are asked for where the cost is measured, and requests a second that miss: a small part of what
a well can do."""


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    counts = {"operations": 0, "incomplete": 0}
    with ExitStack() as stack:
        home = stack.enter_context(wells.well(HOST))
        for operation in ("lookup", "recall", "spill"):
            for tokens, block_tokens in size.prompts:
                job = _job(home, operation, tokens, block_tokens, size)
                rows += _costs(pressed([job], counts), operation, tokens, block_tokens)
        missing = _job(home, "miss", 8 << 10, 128, size)
        rows.append(_missed(pressed([missing], counts)))
        for operation in ("lookup", "recall", "spill"):
            for engines in size.engines:
                job = msgspec.structs.replace(_job(home, operation, 8 << 10, 128, size), rate=0.0)
                rows += _saturated(pressed([job] * engines, counts), operation, engines)
    return Result("blockcost", rows, counts)


def _job(home: Path, operation: str, tokens: int, block_tokens: int, size: Size) -> Job:
    blocks = tokens // block_tokens
    rate = _PACE[operation] if operation == "miss" else _PACE[operation] / blocks
    return Job(
        str(home),
        operation,
        blocks,
        rate=rate,
        windows=size.windows,
        window_s=max(size.window_s, 4 / rate),
        block_tokens=block_tokens,
    )


def _costs(windows: Sequence[Window], operation: str, tokens: int, block_tokens: int) -> list[Row]:
    what = f"{operation}, {tokens >> 10}K tokens in blocks of {block_tokens}"
    cost = stats.ratio_of_paired_means([(window.cpu_s * 1e6, window.blocks) for window in windows])
    late = stats.median([window.late_s * 1e3 for window in windows])
    beside = f"answered in {late.value:.2f} ms; {_busy(windows)}"
    return [Row(what, "us a block", cost, None, beside, {"operation": operation, "answered_ms": round(late.value, 3)})]


def _missed(windows: Sequence[Window]) -> Row:
    cost = stats.ratio_of_paired_means([(window.cpu_s * 1e6, window.operations) for window in windows])
    return Row("a request that misses", "us", cost, None, _busy(windows), {"operation": "miss"})


def _saturated(windows: Sequence[Window], operation: str, engines: int) -> list[Row]:
    speed = stats.ratio_of_paired_means([(window.blocks / 1e3, window.seconds) for window in windows])
    cost = stats.ratio_of_paired_means([(window.cpu_s * 1e6, window.blocks) for window in windows])
    busy = sum(window.loop_s for window in windows) / sum(window.seconds for window in windows)
    said = "saturated" if busy >= _BUSY_SHARE else "not saturated: the engines ask no faster beside it"
    beside = f"{cost.value:.1f} us a block; its thread is busy {busy:.0%} of the time, {said}"
    what = f"{operation}, as many as are answered, {engines} engine{'s' if engines > 1 else ''}"
    return [
        Row(what, "thousand blocks a second", speed, None, beside, {"operation": operation, "busy": round(busy, 3)})
    ]


def _busy(windows: Sequence[Window]) -> str:
    return f"its thread is busy {sum(w.loop_s for w in windows) / sum(w.seconds for w in windows):.0%} of the time"


def pressed(jobs: Sequence[Job], counts: dict[str, int]) -> list[Window]:
    """Windows of all jobs, which begin together, each in a process of its own; those of several jobs at the same moment
    are one. The first, in which all get going, is left out."""
    command = [sys.executable, "-m", "lab.bench.halves.pressure"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) for _ in jobs
        ]
        for process in processes:
            stack.callback(process.kill)
        for process, job in zip(processes, jobs, strict=True):
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("an engine did not start")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        said = [[msgspec.json.decode(line, type=Window) for line in process.stdout or ()] for process in processes]
    windows = [_together(each) for each in zip(*said, strict=True)]
    counts["operations"] += sum(window.operations for window in windows)
    counts["incomplete"] += sum(window.incomplete for window in windows)
    return windows[1:]


def _together(windows: Sequence[Window]) -> Window:
    """Of the same half second, each process's: what the well took is seen by all of them, and counts once."""
    return Window(
        windows[0].seconds,
        sum(window.operations for window in windows),
        sum(window.blocks for window in windows),
        sum(window.incomplete for window in windows),
        windows[0].cpu_s,
        windows[0].loop_s,
        max(window.late_s for window in windows),
        max(window.took_s for window in windows),
        max(window.slowest_s for window in windows),
    )
