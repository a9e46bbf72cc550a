"""The arena's part of the data path: an engine's pages to slots and back, as a worker copies them, beside memcpy.

The engine's KV caches are 32 layers of private memory; a block is one page of each, so what is copied at a time is a
32nd of a block. Pages lie in any order. A step's worth is handed to the copies at once, as the adapter does.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from lab.bench.disk.lane import Arena
from lab.bench.disk.passes import Pass, timed
from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Copying, Mark, Shard
from stepwell.engines.paged.cpu import open_cpu

LAYERS = 32
STEP_BYTES = 64 << 20
_SEED = 5


class Pages:
    """KV caches as large as the arena."""

    def __init__(self, arena: Arena) -> None:
        import torch

        layout = arena.slab.layout
        self._nbytes = arena.nbytes
        size = layout.slot_bytes // LAYERS
        caches = {f"layer {n}": torch.ones((layout.slots, size), dtype=torch.uint8) for n in range(LAYERS)}
        self._copies = open_cpu(caches, layout.slots)
        start, stop = layout.offset, layout.offset + layout.slots * layout.stride
        self._slots = arena.slab.memory.bytes[start:stop].reshape(layout.slots, layout.stride)
        pages = list(range(layout.slots))
        random.Random(_SEED).shuffle(pages)
        shards = [Shard(Slot(self._slots, slot), 0, [page]) for slot, page in enumerate(pages)]
        step = max(1, STEP_BYTES // layout.slot_bytes)
        self._steps = [shards[at : at + step] for at in range(0, len(shards), step)]
        self._plain = np.ones_like(self._slots)

    def spill(self) -> Pass:
        return self._timed(self._copies.gather)

    def recall(self) -> Pass:
        return self._timed(self._copies.scatter)

    def memcpy(self) -> Pass:
        """As many bytes in blocks, by one thread, between memory of the same kinds."""

        def work() -> None:
            for slot, block in zip(self._slots, self._plain, strict=True):
                np.copyto(slot, block)

        return timed(self._nbytes, work)

    def close(self) -> None:
        self._copies.close()

    def _timed(self, copy: Callable[[list[Shard], Mark], Copying]) -> Pass:
        def work() -> None:
            for step in self._steps:
                copy(step, self._copies.now()).wait()

        return timed(self._nbytes, work)
