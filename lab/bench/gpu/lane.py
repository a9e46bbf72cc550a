"""A way between pages and registered slots, and beside it the peak: one large pinned copy of as many bytes.

Everything is timed by the wall, from the first call until the last byte is there: what it takes to hand copies over
counts. They are handed over in parts, as the worker does, and waited for at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lab.bench.disk.passes import Pass, timed
from lab.bench.gpu.engine.kv import Kv
from lab.bench.gpu.stage import Stage
from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Copies, Copying, Shard
from stepwell.io.memory import PIECE, Bytes, SharedMemory

PART_BYTES = 32 << 20
_SEED = 5


class Slab:
    """Shared memory like the arena's, populated; `registered` with the driver where that is needed, and how long that
    took, a GiB."""

    def __init__(self, nbytes: int) -> None:
        self._shared = SharedMemory(nbytes)
        for start in range(0, nbytes, PIECE):
            self._shared.populate(start, min(PIECE, nbytes - start))
        self.bytes: Bytes = self._shared.bytes
        self._undo: Callable[[], None] | None = None
        self.register_s_gib: float | None = None
        self.unregister_s_gib: float | None = None

    def register(self, copies: Copies) -> None:
        if copies.prepare is None:
            return
        began = time.perf_counter()
        self._undo = copies.prepare(self.bytes)
        self.register_s_gib = (time.perf_counter() - began) / (len(self.bytes) / 2**30)

    def close(self) -> None:
        if self._undo is not None:
            began = time.perf_counter()
            self._undo()
            self.unregister_s_gib = (time.perf_counter() - began) / (len(self.bytes) / 2**30)
        self.bytes = self.bytes[:0]
        self._shared.close()


class Lane:
    """Blocks of `pages` pages each. Half of the slab is gathered into from half of the pages, the other half of it is
    scattered into the other pages. Pages lie in any order."""

    def __init__(self, kv: Kv, copies: Copies, slab: Slab, pages: int) -> None:
        self.kv, self.copies = kv, copies
        self.block_bytes = pages * kv.shape.page_bytes
        count = min(len(slab.bytes) // 2 // self.block_bytes, kv.shape.pages // 2 // pages)
        self.nbytes = count * self.block_bytes
        order = list(range(kv.shape.pages))
        random.Random(_SEED).shuffle(order)
        self.sources, self.targets = order[: count * pages], order[count * pages : 2 * count * pages]
        half = slab.bytes[: 2 * self.nbytes].reshape(2, count, self.block_bytes)
        self._gathered = half[0]
        self._out = _shards(half[0], self.sources, pages)
        self._in = _shards(half[1], self.targets, pages)
        self._same = _shards(half[0], self.targets, pages)
        each = max(1, PART_BYTES // self.block_bytes)
        self._starts = range(0, count, each)
        self._each = each

    def gather(self) -> Pass:
        return timed(self.nbytes, lambda: _wait(self._begin(self.copies.gather, self._out)))

    def scatter(self) -> Pass:
        return timed(self.nbytes, lambda: _wait(self._begin(self.copies.scatter, self._in)))

    def both(self) -> Pass:
        """Part by part in turn, so that both queues have work from the start."""

        def work() -> None:
            after = self.copies.now()
            under_way: list[Copying] = []
            for at in self._starts:
                under_way.append(self.copies.gather(self._out[at : at + self._each], after))
                under_way.append(self.copies.scatter(self._in[at : at + self._each], after))
            _wait(under_way)

        return timed(2 * self.nbytes, work)

    def differing(self) -> int:
        """Bytes that differ after a round trip of random pages through the slots into other pages."""
        self.kv.fill(_SEED)
        self._gathered[:] = 0  # or what an earlier trip has left there would come back
        _wait(self._begin(self.copies.gather, self._out))
        self.kv.poison(self.targets)
        _wait(self._begin(self.copies.scatter, self._same))
        wrong = 0
        for layer in self.kv.words:
            for at in range(0, len(self.sources), 256):
                source = torch.tensor(self.sources[at : at + 256], device=layer.device)
                target = torch.tensor(self.targets[at : at + 256], device=layer.device)
                wrong += int((layer[source] != layer[target]).sum())
        return wrong

    def _begin(self, copy: Any, shards: Sequence[Shard]) -> list[Copying]:
        after = self.copies.now()
        return [copy(shards[at : at + self._each], after) for at in self._starts]


def _shards(slots: Bytes, order: Sequence[int], pages: int) -> list[Shard]:
    return [Shard(Slot(slots, n), 0, order[n * pages : (n + 1) * pages]) for n in range(len(slots))]


def _wait(under_way: Sequence[Copying]) -> None:
    for copying in under_way:
        copying.wait()


class Peak:
    """torch's own copy between pinned memory and the device, of `nbytes` at once."""

    def __init__(self, stage: Stage, nbytes: int) -> None:
        self._stage, self.nbytes = stage, nbytes
        self._host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=not stage.tiny) for _ in range(2)]
        self._pages = [torch.zeros(nbytes, dtype=torch.uint8, device=stage.device) for _ in range(2)]
        self._streams = None if stage.tiny else [torch.cuda.Stream(), torch.cuda.Stream()]

    def out(self) -> Pass:
        return timed(self.nbytes, lambda: self._copy(self._host[0], self._pages[0]))

    def into(self) -> Pass:
        return timed(self.nbytes, lambda: self._copy(self._pages[1], self._host[1]))

    def both(self) -> Pass:
        def work() -> None:
            pairs = (self._host[0], self._pages[0]), (self._pages[1], self._host[1])
            for n, (to, source) in enumerate(pairs):
                if self._streams is None:
                    to.copy_(source)
                else:
                    with torch.cuda.stream(self._streams[n]):
                        to.copy_(source, non_blocking=True)
            self._stage.wait()

        return timed(2 * self.nbytes, work)

    def _copy(self, to: Any, source: Any) -> None:
        to.copy_(source, non_blocking=True)
        self._stage.wait()
