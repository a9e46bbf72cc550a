"""Recalling a prompt against computing it, by length and tier, and where the two are equal; docs/benchmarks.md."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.bench import storage, wells
from lab.bench.gpu.engine.compute import Marks
from lab.bench.gpu.engine.halves import open_halves
from lab.bench.gpu.engine.kv import Kv, Layout
from lab.bench.gpu.engine.serving import Engine
from lab.bench.gpu.prefill import Prefills, flops, prefills
from lab.bench.gpu.recalls import Moved, Prompts, Recalls
from lab.bench.gpu.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.client.patience import Patience
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate
from stepwell.errors import StepwellError

GIB = 1 << 30
TIERS = {"host": "host memory", "disk": "disk"}
JUDGED = 32 * 1024
FASTER, CPU_S_GB = Target(">=", 10), Target("<=", 0.02)
WORK_BYTES = 8 * GIB
"""Of the GPU's memory, beside weights and KV, for a chunk's activations."""

PATIENT = Patience(10.0, 120.0)
"""In the product a recall that is late is cut short; here it is to be known how long it takes."""


@dataclass(frozen=True, slots=True)
class Size:
    """`passes`: how far each pass of computing goes."""

    page: int
    lengths: tuple[int, ...]
    chunk: int
    passes: tuple[int, ...]
    repeats: int


K = 1024
FULL = Size(16, (8 * K, 16 * K, 32 * K, 64 * K, 128 * K), 8 * K, (32 * K, 128 * K, 32 * K), 5)
QUICK = Size(16, (8 * K, 32 * K), 8 * K, (32 * K,), 2)
TINY = Size(16, (256, 512), 128, (512, 512), 2)


def run(stage: Stage, folder: Path | None = None) -> Result:
    """`folder`: for the disk tier's files, which are gone at the end; None: the system's temporary one."""
    size = TINY if stage.tiny else QUICK if stage.quick else FULL
    remarks: list[str] = []
    lengths = _fitting(stage, size, remarks)
    computed, found = Prefills(), Recalls()
    if lengths and not stage.over:
        pages = max(lengths) // size.page + 2
        kv = Kv.make(stage.model.kv(pages, size.page, stage.dtype), Layout.BLHNC, stage.device)
        passes = [min(most, max(lengths)) for most in size.passes]
        computed = prefills(stage.part(0.4), kv, lengths, size.chunk, passes)
        found = _recalled(stage, size, kv, lengths, folder, remarks)
    rows = [*_rows(stage, size, computed, found), *_costs(found)]
    remarks += [
        "recall: from the scheduler's first ask until all pages are filled; recompute: chunks of "
        f"{size.chunk} tokens, dummy weights of the shape of {'a toy' if stage.tiny else 'Llama 8B'}",
        *found.partial[:4],
    ]
    return Result("gpu-recall", rows, {"repeats": size.repeats, "pages_compared": found.compared}, remarks)


def _fitting(stage: Stage, size: Size, remarks: list[str]) -> list[int]:
    """Lengths whose KV fits the GPU beside the model, and twice the host memory that is free."""
    if stage.tiny:
        return list(size.lengths)
    token = stage.model.kv(1, 1, stage.dtype).page_bytes
    on_device = stage.free_bytes() - 2 * stage.model.parameters - WORK_BYTES
    most = min(on_device // token, _available() // 3 // token)
    if most < max(size.lengths):
        remarks.append(f"memory of GPU and host has room for {most} tokens: longer prompts were left out")
    return [length for length in size.lengths if length <= most]


def _available() -> int:
    """Host memory."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _recalled(stage: Stage, size: Size, kv: Kv, lengths: list[int], folder: Path | None, remarks: list[str]) -> Recalls:
    most = max(lengths) // size.page * kv.shape.page_bytes
    host = max(64 << 20, 2 * most + 3 * GIB) if not stage.tiny else 64 << 20
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-", dir=folder) as name:
        disk = _disk(Path(name), most, remarks)
        with wells.well(host, **({"disk": disk} if disk else {})) as home:
            halves = open_halves(home, kv, block_tokens=stage.block_tokens, patience=PATIENT)
            with halves:
                halves.wait_ready()
                try:
                    halves.grow(most, min(60.0, stage.deadline - time.monotonic()))
                except TimeoutError as error:
                    remarks.append(f"spills waited for memory: {error}")
                marks = Marks(kv)
                prompts = Prompts(Engine(kv, halves, marks, budget=size.chunk), marks, home, max(lengths))
                _all(stage, size, prompts, lengths, bool(disk))
                if halves.told:
                    remarks.append("trouble was told: " + "; ".join(halves.told[:3]))
    return prompts.found


def _disk(folder: Path, most: int, remarks: list[str]) -> str | None:
    """The setting of a disk tier with room for all, if there is room."""
    wanted = max(most * 5 // 4, GIB)
    usage = shutil.disk_usage(folder)
    needed = wanted + usage.total // 10  # a twentieth is left to others by the well itself
    remarks.append(f"the disk tier is on {storage.filesystem(folder)}")
    if usage.free < needed:
        remarks.append(f"no disk tier: {usage.free / GIB:.0f} GiB are free there, {needed / GIB:.0f} GiB are needed")
        return None
    return f"{folder}:{-(-wanted // GIB)}GiB"


def _all(stage: Stage, size: Size, prompts: Prompts, lengths: list[int], disk: bool) -> None:
    try:
        for length in lengths:
            if stage.over:
                return
            prompts.spill(length)
            if disk:
                prompts.written(min(stage.deadline, time.monotonic() + 10.0))
            for _ in range(size.repeats):
                prompts.recall("host", length)
        prompts.check("host", lengths[-1])
        if not disk or not prompts.written(stage.deadline):
            return
        for length in lengths:
            for _ in range(min(2, size.repeats)):
                if stage.over:
                    return
                prompts.forget_host()
                prompts.recall("disk", length)
        prompts.forget_host()
        prompts.check("disk", lengths[0])
    except (TimeoutError, StepwellError) as error:
        prompts.found.partial.append(f"{type(error).__name__}: {error}")


def _rows(stage: Stage, size: Size, computed: Prefills, found: Recalls) -> Iterator[Row]:
    token = stage.model.kv(1, 1, stage.dtype).page_bytes
    for length in size.lengths:
        name = f"{length // K}K tokens" if length >= K else f"{length} tokens"
        seconds = stats.median(computed.seconds[length]) if computed.seconds.get(length) else None
        recalls = {t: stats.median(v) for t in TIERS if (v := found.seconds.get((t, length)))}
        for tier, what in TIERS.items():
            target = FASTER if (tier, length) == ("host", JUDGED) else None
            ratio, why = None, SKIPPED
            if seconds is not None and tier in recalls:
                ratio = stats.ratio_of_percentiles(computed.seconds[length], found.seconds[tier, length], 50)
                why = ""
            yield Row(f"recompute over recall from {what}, {name}", "x", ratio, target, why)
        yield _recompute(stage, computed, length, name)
        for tier, what in TIERS.items():
            used = found.joules.get((tier, length))
            took = recalls.get(tier)
            beside = f"{length * token / took.value / 1e9:.3g} GB/s" if took else SKIPPED
            more = {"joules": used, "bytes": length * token}
            yield Row(f"  recall from {what}, {name}", "s", took, None, beside, more)
        if seconds is not None:
            speed = {t: length * token / took.value / 1e9 for t, took in recalls.items()}
            beside = ", ".join(f"{TIERS[t]} gave {gb_s:.3g}" for t, gb_s in speed.items())
            even = [length * token / s / 1e9 for s in computed.seconds[length]]
            more = {f"{tier}_gb_s": gb_s for tier, gb_s in speed.items()}
            yield Row(f"  bandwidth at which both are equal, {name}", "GB/s", stats.median(even), None, beside, more)


def _recompute(stage: Stage, computed: Prefills, length: int, name: str) -> Row:
    what = f"  recompute, {name}"
    if not computed.seconds.get(length):
        return Row(what, "s", None, None, SKIPPED)
    took = stats.median(computed.seconds[length])
    share = stats.median(computed.gathering[length]).value
    speed = flops(stage.model, length) / took.value / 1e12
    beside = f"{speed:.3g} TFLOP/s; {100 * share:.1f} % were taken off for gathering pages"
    return Row(what, "s", took, None, beside, {"joules": computed.joules.get(length), "tflop_s": speed})


def _costs(found: Recalls) -> Iterator[Row]:
    for what, moved in (("recalls", found.recalled), ("spills", found.spilled)):
        yield _cost(f"processor time of {what}: hooks, and stepwell's threads beside them", moved, moved.engine_s)
        yield _cost(f"  processor time of {what}: the well", moved, moved.well_s, judged=False)
    differing = float(found.differing)
    measured = Estimate(differing, differing, differing, found.compared) if found.compared else None
    yield Row("bytes that differ after a recall", "", measured, Target("<=", 0), "" if found.compared else SKIPPED)


def _cost(name: str, moved: Moved, seconds: float, *, judged: bool = True) -> Row:
    target = CPU_S_GB if judged else None
    if not moved.nbytes:
        return Row(name, "s/GB", None, target, SKIPPED)
    cost = seconds / moved.nbytes * 1e9
    return Row(name, "s/GB", Estimate(cost, cost, cost, 1), target)
