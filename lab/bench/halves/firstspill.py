"""The first spill of a fresh well, against memcpy of as many bytes in the same run.

A worker's KV caches have the demo model's layout (30 layers; pages of 128 and of 32 tokens). A prompt is prefilled in
small steps; what each step's last hook takes to copy the finished blocks into slots that nobody has written before,
and to acknowledge them, is one side of a pair. The other is one numpy copy of as many bytes between memory of the same
kinds: from private memory in small pages, as torch gives it, to shared memory that was touched long ago. A second copy,
between private buffers in huge pages, is there to be read: it is what the hardware could do and neither kind of memory
allows. All walk through memory that they do not use again soon. `charges` says whose the arena is.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.bench import wells
from lab.bench.halves import charges
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.demo.results.measure import ratio
from stepwell.io.memory import Bytes, SharedMemory

if TYPE_CHECKING:
    from lab.bench.halves.standin import StandIn

LAYERS = 30
LAYOUTS = {128: 96 << 10, 32: 24 << 10}
"""Bytes of a page in one layer, by tokens of a page: SmolLM2-135M in bf16."""

_STEP_TOKENS = 512
_MADV_NOHUGEPAGE = 15


@dataclass(frozen=True, slots=True)
class Size:
    """`wells` fresh ones per layout, each with an arena of `host` bytes; `steps` steps that spill in each."""

    wells: int
    host: int
    steps: int


FULL, QUICK = Size(8, 4 << 30, 10), Size(1, 1 << 30, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    copies = 0
    for page, layer_bytes in LAYOUTS.items():
        block_bytes = LAYERS * layer_bytes
        pairs = [pair for _ in range(size.wells) for pair in _fresh_well(size, page, layer_bytes)]
        copies += len(pairs)
        shares = ratio([pair.memcpy_s / pair.spill_s for pair in pairs])
        assert shares is not None
        speed = stats.median([pair.nbytes / pair.spill_s / 1e9 for pair in pairs])
        limit = stats.median([pair.nbytes / pair.memcpy_s / 1e9 for pair in pairs])
        huge = stats.median([pair.nbytes / pair.huge_s / 1e9 for pair in pairs])
        what = f"first spill over memcpy, pages of {page} tokens ({LAYERS} x {layer_bytes >> 10} KiB)"
        estimate = stats.Estimate(shares.median, shares.low, shares.high, shares.count)
        beside = f"{pairs[0].nbytes / block_bytes:.0f} blocks, {pairs[0].nbytes / 2**20:.1f} MiB a copy"
        rows.append(Row(what, "", estimate, Target(">=", 0.8), beside))
        rows.append(Row("  spill", "GB/s", speed))
        rows.append(Row("  memcpy, same kinds of memory", "GB/s", limit))
        rows.append(Row("  memcpy, private huge pages", "GB/s", huge))
    return Result("firstspill", [*rows, *charges.rows(quick)], {"pairs": copies, "fresh_wells": 2 * size.wells})


@dataclass(frozen=True, slots=True)
class Pair:
    nbytes: int
    spill_s: float
    memcpy_s: float
    huge_s: float


class Memcpy:
    """Copies the next `nbytes` of one buffer to another, coming round again as late as it can."""

    def __init__(self, source: Bytes, target: Bytes) -> None:
        self._from, self._to = source, target
        self._at = 0

    def __call__(self, nbytes: int) -> float:
        if self._at + nbytes > len(self._to):
            self._at = 0
        start, self._at = self._at, self._at + nbytes
        source, target = self._from[start : self._at], self._to[start : self._at]
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began


def _fresh_well(size: Size, page: int, layer_bytes: int) -> Iterator[Pair]:
    from lab.bench.halves.standin import Kv, StandIn, prompts

    tokens = _STEP_TOKENS * size.steps
    kv = Kv(page, page, tokens // page + 8, LAYERS, layer_bytes)
    nbytes = kv.shard_bytes * tokens // page
    memcpy = Memcpy(_small_pages(nbytes), _shared(nbytes))
    huge = Memcpy(np.full(nbytes, 1, np.uint8), np.full(nbytes, 2, np.uint8))
    pairs: list[Pair] = []

    class Timed(StandIn):
        def save(self, plan: Any) -> None:
            nbytes = kv.shard_bytes * len(plan.saves)
            if not nbytes:
                super().save(plan)
                return
            first = memcpy(nbytes) if len(pairs) % 2 else 0.0
            began = time.perf_counter()
            super().save(plan)
            spill_s = time.perf_counter() - began
            pairs.append(Pair(nbytes, spill_s, first or memcpy(nbytes), huge(nbytes)))

    with wells.well(size.host) as home, Timed(home, kv, pause_s=0.02, tokens_a_step=_STEP_TOKENS) as engine:
        for cache in engine.caches.values():
            cache.fill_(3)
        engine.wait_ready()
        engine.serve(next(prompts(tokens, page)))
        _check(engine)
    yield from pairs


def _small_pages(nbytes: int) -> Bytes:
    """Private memory in 4 KiB pages, touched."""
    anonymous = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anonymous.madvise(_MADV_NOHUGEPAGE)
    array: Bytes = np.frombuffer(anonymous, np.uint8)
    array.fill(1)
    return array


def _shared(nbytes: int) -> Bytes:
    """Shared memory as a slab's, touched."""
    shared = SharedMemory(nbytes)
    shared.bytes.fill(2)
    return shared.bytes


def _check(engine: StandIn) -> None:
    """A copy that did not take place would be very fast."""
    if engine.troubles:
        raise RuntimeError("; ".join(engine.troubles))
