"""Gather and scatter, by layout and block size, beside the pinned-copy peak of the same minute; docs/benchmarks.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from lab.bench.disk.passes import Pass
from lab.bench.gpu import card
from lab.bench.gpu.engine.kv import COMPACT, Kv, Layout, Shape
from lab.bench.gpu.lane import Lane, Peak, Slab
from lab.bench.gpu.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate
from stepwell.engines.paged import open_copies
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.gpu.method import kernel_can

KINDS = ("gather", "scatter", "both")
MIB = 1 << 20
LARGE = MIB
"""Blocks from here on must reach the targets."""

SHARE, CPU_S_GB = Target(">=", 0.8), Target("<=", 0.02)
ENERGY_S = 2.0
NONE = "none was measured"


@dataclass(frozen=True, slots=True)
class Block:
    """`pages` pages of `page` tokens: of `layers` layers and `heads` KV heads of 128 numbers, in bf16, on one rank."""

    layers: int
    heads: int
    page: int
    pages: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.heads * self.page * 256 * 2 * self.pages


BLOCKS = (
    Block(32, 1, 16, 1),
    Block(32, 4, 16, 1),
    Block(32, 8, 16, 1),
    Block(32, 8, 16, 4),
    Block(32, 8, 16, 16),
    Block(32, 8, 256, 1),
)
TINY_BLOCKS = (Block(2, 1, 16, 1), Block(2, 2, 16, 2))


@dataclass(frozen=True, slots=True)
class Point:
    """Passes of each kind, each with the peak's beside it. `ways`: GB/s of each kind by each way, where there are two;
    `chosen`: the way of each direction that was measured to be faster at the start."""

    layout: Layout
    block: Block
    passes: dict[str, list[tuple[Pass, Pass]]]
    ways: dict[str, dict[str, float]]
    chosen: dict[str, str]
    differing: int

    @property
    def name(self) -> str:
        return f"{self.layout.value}, blocks of {_size(self.block.nbytes)}, pages of {self.block.page} tokens"

    def shares(self, kind: str) -> Estimate:
        return stats.median([ours.gb_s / limit.gb_s for ours, limit in self.passes[kind]])

    def cpu_s_gb(self, kind: str) -> Estimate:
        return stats.median([ours.cpu_s / ours.nbytes * 1e9 for ours, _ in self.passes[kind]])


def run(stage: Stage) -> Result:
    nbytes = 8 * MIB if stage.tiny else 256 * MIB
    repeats = 2 if stage.quick or stage.tiny else 7
    slab, peak = Slab(2 * nbytes), Peak(stage, nbytes)
    points: list[Point] = []
    skipped = 0
    try:
        for block in TINY_BLOCKS if stage.tiny else BLOCKS:
            for layout in COMPACT:
                if stage.over:
                    skipped += 1
                else:
                    points.append(_point(stage, layout, block, slab, peak, repeats))
        used = _energy(stage, slab)
    finally:
        slab.close()
    rows = [*_judged(points), *_registration(slab), used]
    rows += [_row(point, kind) for point in points for kind in KINDS]
    if skipped:
        rows.append(Row(f"{skipped} more layouts and block sizes", "GB/s", None, None, SKIPPED))
    remarks = [
        f"{_size(nbytes)} a pass, by the wall, between pages in random order and slots of registered shared memory",
        "the peak: one copy of as many bytes between pinned memory and the device, taken in turn",
    ]
    return Result("gpu-copies", rows, {"points": len(points), "passes": repeats}, remarks)


def _lane(stage: Stage, layout: Layout, block: Block, slab: Slab) -> Lane:
    count = len(slab.bytes) // block.nbytes * block.pages
    kv = Kv.make(Shape(block.layers, count, block.heads, block.page, 256), layout, stage.device)
    lane = Lane(kv, open_copies(kv.caches, count), slab, block.pages)
    if slab.register_s_gib is None:
        slab.register(lane.copies)
    return lane


def _point(stage: Stage, layout: Layout, block: Block, slab: Slab, peak: Peak, repeats: int) -> Point:
    lane = _lane(stage, layout, block, slab)
    calls = {"gather": lane.gather, "scatter": lane.scatter, "both": lane.both}
    limits = {"gather": peak.out, "scatter": peak.into, "both": peak.both}
    differing = lane.differing()
    ways: dict[str, dict[str, float]] = {}
    chosen: dict[str, str] = {}
    if isinstance(copies := lane.copies, GpuCopies):
        before = copies.methods
        chosen = {direction.value: way.value for direction, way in before.items()}
        for way in _ways(copies):
            copies.methods = dict.fromkeys(Direction, way)
            differing += lane.differing()
            ways[way.value] = {kind: stats.median([calls[kind]().gb_s for _ in range(3)]).value for kind in KINDS}
        copies.methods = before
    passes: dict[str, list[tuple[Pass, Pass]]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            passes[kind].append((calls[kind](), limits[kind]()))
    lane.copies.close()
    return Point(layout, block, passes, ways, chosen, differing)


def _ways(copies: GpuCopies) -> list[CopyMethod]:
    both = kernel_can(copies.pool, copies.device) and find_spec("triton")
    return list(CopyMethod) if both else [CopyMethod.ENGINE]


def _judged(points: list[Point]) -> Iterator[Row]:
    large = [point for point in points if point.block.nbytes >= LARGE]
    for kind in ("gather", "scatter"):
        what = f"{kind}, blocks of 1 MiB and more, over the peak: the least of all layouts and sizes"
        found = min(((point.shares(kind), point) for point in large), key=lambda pair: pair[0].value, default=None)
        yield Row(what, "", found and found[0], SHARE, found[1].name if found else NONE)
    for kind in ("gather", "scatter"):
        what = f"processor time of a {kind}, blocks of 1 MiB and more: the most of all layouts and sizes"
        found = max(((point.cpu_s_gb(kind), point) for point in large), key=lambda pair: pair[0].value, default=None)
        yield Row(what, "s/GB", found and found[0], CPU_S_GB, found[1].name if found else NONE)
    wrong = float(sum(point.differing for point in points))
    measured = Estimate(wrong, wrong, wrong, len(points)) if points else None
    yield Row("bytes that differ after a round trip", "", measured, Target("<=", 0), "" if points else NONE)


def _row(point: Point, kind: str) -> Row:
    share, ours = point.shares(kind), stats.median([one.gb_s for one, _ in point.passes[kind]])
    limit = stats.median([one.gb_s for _, one in point.passes[kind]])
    ways = {way: speeds[kind] for way, speeds in point.ways.items()}
    chosen = point.chosen.get(kind) or "+".join(point.chosen.values())
    told = [f"{100 * share.value:.0f} % of {limit.value:.1f}", *(f"{way} {gb_s:.1f}" for way, gb_s in ways.items())]
    more: dict[str, str | int | float | None] = {
        "layout": point.layout.value,
        "block_bytes": point.block.nbytes,
        "share_of_peak": share.value,
        "peak_gb_s": limit.value,
        "cpu_s_gb": point.cpu_s_gb(kind).value,
        "chosen": chosen or None,
        **{f"{way}_gb_s": gb_s for way, gb_s in ways.items()},
    }
    beside = ", ".join([*told, *([f"chosen: {chosen}"] if chosen else [])])
    return Row(f"{kind}, {point.name}", "GB/s", ours, None, beside, more)


def _registration(slab: Slab) -> Iterator[Row]:
    for what, found in (("registration", slab.register_s_gib), ("taking it back", slab.unregister_s_gib)):
        estimate = Estimate(found, found, found, 1) if found is not None else None
        yield Row(f"{what} of shared memory with the driver", "s/GiB", estimate, None, "" if estimate else "no driver")


def _energy(stage: Stage, slab: Slab) -> Row:
    """Of copies for a while, less what the GPU uses when idle."""
    what = "energy of a gather, beyond the GPU's idle power"
    before = card.joules()
    if stage.over or before is None:
        why = SKIPPED if stage.over else "no NVML here, or the GPU does not count its energy"
        return Row(what, "J/GB", None, None, why)
    lane = _lane(stage, Layout.BLHNC, (TINY_BLOCKS if stage.tiny else BLOCKS)[-1], slab)
    before, began, moved = card.joules() or 0.0, time.monotonic(), 0
    time.sleep(ENERGY_S)
    idle = ((card.joules() or before) - before) / (time.monotonic() - began)
    before, began = card.joules() or 0.0, time.monotonic()
    while time.monotonic() - began < ENERGY_S:
        moved += lane.gather().nbytes
    used = (card.joules() or before) - before - idle * (time.monotonic() - began)
    found = used / moved * 1e9
    lane.copies.close()
    return Row(what, "J/GB", Estimate(found, found, found, 1), None, f"idle {idle:.0f} W")


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"
