"""An engine's pages to slots and back, as a worker copies them, beside one memcpy of as many bytes.

The KV is one buffer, layer by layer, as vLLM allocates it on CPU; a block is one page of each layer. The memcpy goes
between the same two memories, by as many threads as the copy. Both walk through more memory than a cache holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from lab.bench.disk.lane import Arena
from lab.bench.report import Result, Row, Target
from stepwell.client.worker import Slot
from stepwell.demo.results import stats
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.cpu import PIECE_BYTES, open_cpu
from stepwell.engines.paged.team import ALONE_BYTES, Copy, Team

KIB, MIB = 1 << 10, 1 << 20
STEP_BYTES = (1, 16 * MIB, 64 * MIB)
"""What one call copies: as many blocks as this holds, one at least."""

MOST = Target("<=", 1.1)
_SEED = 5


class Shape(NamedTuple):
    """`layer_bytes`: of one layer's page."""

    model: str
    page: int
    layers: int
    layer_bytes: int


SHAPES = (
    *(Shape("SmolLM2-135M in float32", page, 30, page * 2 * 3 * 64 * 4) for page in (32, 128)),
    *(Shape("8B in bfloat16", page, 32, page * 2 * 8 * 128 * 2) for page in (32, 128)),
)


def run(quick: bool) -> Result:
    nbytes, pairs = (128 * MIB, 2) if quick else (768 * MIB, 60)
    rows = [row for shape in SHAPES for row in _rows(shape, nbytes, pairs)]
    remarks = [
        "time over time of blocks of one page each, between private memory in small pages and shared memory; in any"
        f" order: pages and slots are; one thread up to {ALONE_BYTES // MIB} MiB, then two, for both",
    ]
    return Result("copies", rows, {"pairs": pairs}, remarks)


def _rows(shape: Shape, nbytes: int, count: int) -> Iterator[Row]:
    each = shape.layers * shape.layer_bytes
    stand = Stand(shape, nbytes // each)
    for blocks in sorted({max(1, step // each) for step in STEP_BYTES}):
        for order in ("in order", "any order"):
            for way in ("recall", "spill"):
                pairs = [stand.pair(blocks, order, way, copy_first=bool(n % 2)) for n in range(count)]
                ours, limit = (blocks * each / stats.median(times).value / 1e9 for times in zip(*pairs, strict=True))
                what = f"{shape.model}, page {shape.page}: {way} of {blocks}, {order} / memcpy"
                pieces = f"{blocks * each / MIB:.1f} MiB in pieces of {shape.layer_bytes // KIB} KiB"
                ratio = stats.median([one / other for one, other in pairs])
                yield Row(what, "", ratio, MOST, f"{pieces}, {ours:.1f} of {limit:.1f} GB/s")
    stand.close()


class Stand:
    """KV of `count` pages, and slots for as many blocks."""

    def __init__(self, shape: Shape, count: int) -> None:
        import torch

        kv = torch.ones((shape.layers, count, shape.layer_bytes), dtype=torch.uint8)
        self._arena = Arena(shape.layers * shape.layer_bytes, count)
        layout = self._arena.slab.layout
        self._kv = kv.numpy().reshape(-1)
        self._slots = self._arena.slab.memory.bytes[layout.offset :].reshape(count, layout.stride)
        self._copies = open_cpu({str(n): layer for n, layer in enumerate(kv)}, count)
        self._team = Team()
        shuffled = [random.Random(_SEED + n).sample(range(count), count) for n in range(2)]
        self._orders = {"in order": [list(range(count))] * 2, "any order": shuffled}
        self._at = 0

    def pair(self, blocks: int, order: str, way: str, *, copy_first: bool) -> tuple[float, float]:
        """Seconds of a copy, and of a memcpy of as many bytes."""
        if copy_first:
            return self._copy(blocks, order, way), self._memcpy(blocks, way)
        memcpy_s = self._memcpy(blocks, way)
        return self._copy(blocks, order, way), memcpy_s

    def _next(self, blocks: int) -> slice:
        """The next blocks, coming round as late as possible."""
        start = self._at if self._at + blocks <= len(self._slots) else 0
        self._at = start + blocks
        return slice(start, self._at)

    def _copy(self, blocks: int, order: str, way: str) -> float:
        which = self._next(blocks)
        pages, slots = (numbers[which] for numbers in self._orders[order])
        shards = [Shard(Slot(self._slots, slot), 0, [page]) for page, slot in zip(pages, slots, strict=True)]
        copy = self._copies.scatter if way == "recall" else self._copies.gather
        began = time.perf_counter()
        copy(shards, self._copies.now()).wait()
        return time.perf_counter() - began

    def _memcpy(self, blocks: int, way: str) -> float:
        which, each = self._next(blocks), self._slots.shape[1]
        kv, slots = (memory[which.start * each : which.stop * each] for memory in (self._kv, self._slots.reshape(-1)))
        to, source = (kv, slots) if way == "recall" else (slots, kv)
        cuts = [slice(at, at + PIECE_BYTES) for at in range(0, len(to), PIECE_BYTES)]
        began = time.perf_counter()
        self._team.copy([Copy(to[cut], source[cut]) for cut in cuts], len(to))
        return time.perf_counter() - began

    def close(self) -> None:
        self._copies.close()
        self._team.close()
        del self._slots
        self._arena.close()
