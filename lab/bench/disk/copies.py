"""An engine's pages to slots and back, as a worker copies them, beside one memcpy of as many bytes.

The KV is one buffer, layer by layer, as vLLM allocates it on CPU; a block is one page of each layer. The memcpy goes
between the same two memories, by as many threads as the copy. Both walk through more memory than a cache holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.bench.disk.lane import Arena
from lab.bench.report import Result, Row, Target
from stepwell.client.worker import Slot
from stepwell.demo.results import stats
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.cpu import PIECE_BYTES, open_cpu
from stepwell.engines.paged.team import ALONE_BYTES, Copy, Team

if TYPE_CHECKING:
    from stepwell.io.memory import Bytes

KIB, MIB = 1 << 10, 1 << 20
STEP_BYTES = (1, 16 * MIB, 64 * MIB)
"""What one call copies: as many blocks as this holds, one at least."""

MOST = Target("<=", 1.1)
_SEED = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """`layer_bytes`: of one layer's page."""

    model: str
    page: int
    layers: int
    layer_bytes: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes


SHAPES = (
    *(Shape("SmolLM2-135M in float32", page, 30, page * 2 * 3 * 64 * 4) for page in (32, 128)),
    *(Shape("8B in bfloat16", page, 32, page * 2 * 8 * 128 * 2) for page in (32, 128)),
)


@dataclass(frozen=True, slots=True)
class Size:
    """`nbytes` of KV, and as much arena; `pairs` of each row."""

    nbytes: int
    pairs: int


FULL, QUICK = Size(768 * MIB, 60), Size(128 * MIB, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows = [row for shape in SHAPES for row in _rows(shape, size)]
    remarks = [
        "time over time of blocks of one page each, between private memory in small pages and shared memory; in any"
        f" order: pages and slots are; one thread up to {ALONE_BYTES // MIB} MiB, then two, for both",
    ]
    return Result("copies", rows, {"pairs": size.pairs}, remarks)


def _rows(shape: Shape, size: Size) -> Iterator[Row]:
    stand = Stand(shape, size.nbytes // shape.nbytes)
    try:
        for blocks in sorted({max(1, nbytes // shape.nbytes) for nbytes in STEP_BYTES}):
            for scattered in (False, True):
                for recall in (True, False):
                    pairs = [stand.pair(blocks, scattered, recall) for _ in range(size.pairs)]
                    yield _row(shape, blocks, scattered, recall, pairs)
    finally:
        stand.close()


def _row(shape: Shape, blocks: int, scattered: bool, recall: bool, pairs: list[tuple[float, float]]) -> Row:
    nbytes = blocks * shape.nbytes
    ours, limit = (nbytes / stats.median(seconds).value / 1e9 for seconds in zip(*pairs, strict=True))
    order = "any order" if scattered else "in order"
    what = f"{shape.model}, page {shape.page}: {'recall' if recall else 'spill'} of {blocks}, {order} / memcpy"
    ratio = stats.median([one / other for one, other in pairs])
    beside = f"{nbytes / MIB:.1f} MiB in pieces of {shape.layer_bytes // KIB} KiB, {ours:.1f} of {limit:.1f} GB/s"
    return Row(what, "", ratio, MOST, beside)


class Stand:
    """KV of `count` pages, and slots for as many blocks."""

    def __init__(self, shape: Shape, count: int) -> None:
        import torch

        kv = torch.ones((shape.layers, count, shape.layer_bytes), dtype=torch.uint8)
        self._arena = Arena(shape.nbytes, count)
        layout = self._arena.slab.layout
        self._kv: Bytes = kv.numpy().reshape(-1)
        self._slots = self._arena.slab.memory.bytes[layout.offset :].reshape(count, layout.stride)
        self._copies = open_cpu({str(n): layer for n, layer in enumerate(kv)}, count)
        self._team = Team()
        self._shuffled = [random.Random(_SEED + n).sample(range(count), count) for n in range(2)]
        self._count = count
        self._turn = self._at = 0

    def pair(self, blocks: int, scattered: bool, recall: bool) -> tuple[float, float]:
        """Seconds of a copy, and of a memcpy of as many bytes; the other one is first the next time."""
        self._turn += 1
        if self._turn % 2:
            return self._copy(blocks, scattered, recall), self._memcpy(blocks, recall)
        memcpy_s = self._memcpy(blocks, recall)
        return self._copy(blocks, scattered, recall), memcpy_s

    def _next(self, blocks: int) -> slice:
        """The next blocks, coming round as late as possible."""
        start = self._at if self._at + blocks <= self._count else 0
        self._at = start + blocks
        return slice(start, self._at)

    def _copy(self, blocks: int, scattered: bool, recall: bool) -> float:
        which = self._next(blocks)
        pages, slots = (order[which] for order in (self._shuffled if scattered else [range(self._count)] * 2))
        shards = [Shard(Slot(self._slots, slot), 0, [page]) for page, slot in zip(pages, slots, strict=True)]
        copy = self._copies.scatter if recall else self._copies.gather
        began = time.perf_counter()
        copy(shards, self._copies.now()).wait()
        return time.perf_counter() - began

    def _memcpy(self, blocks: int, recall: bool) -> float:
        each = self._slots.shape[1]
        which = self._next(blocks)
        kv, slots = (memory[which.start * each : which.stop * each] for memory in (self._kv, self._slots.reshape(-1)))
        to, source = (kv, slots) if recall else (slots, kv)
        cuts = [slice(at, at + PIECE_BYTES) for at in range(0, len(to), PIECE_BYTES)]
        began = time.perf_counter()
        self._team.copy([Copy(to[cut], source[cut]) for cut in cuts], len(to))
        return time.perf_counter() - began

    def close(self) -> None:
        self._copies.close()
        self._team.close()
        del self._slots
        self._arena.close()
