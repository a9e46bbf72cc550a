"""What copies are compared with: pages as bytes, wherever they are; and each way that there is of copying them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from lab.bench.gpu.engine.kv import Kv
from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Copies, Shard
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.gpu.method import kernel_can
from stepwell.engines.paged.pool import pool_of
from stepwell.io.memory import Bytes


def each_way(copies: Copies) -> Iterator[str]:
    """As they were opened; then, on a GPU, each way by itself."""
    yield "as opened"
    if isinstance(copies, GpuCopies):
        for way in CopyMethod:
            if way is CopyMethod.ENGINE or (kernel_can(copies.pool, copies.device) and find_spec("triton")):
                copies.methods = dict.fromkeys(Direction, way)
                yield way.value


def shards(slots: Bytes, pages: Sequence[int], each: int, skip: int = 0) -> list[Shard]:
    """Slot after slot, `each` pages of it, from its page `skip` on."""
    return [Shard(Slot(slots, n), skip, list(pages[at : at + each])) for n, at in enumerate(range(0, len(pages), each))]


class Mirror:
    """The KV's memory as it must be: all of its bytes, padding included. Pages are found by arithmetic of its own."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        base = kv.buffer.data_ptr()
        self._rows = [(row.address - base, row.stride, row.nbytes) for row in pool_of(kv.caches, kv.shape.pages).rows]
        self.bytes: npt.NDArray[np.uint8] = kv.buffer.cpu().numpy().copy()

    def page(self, number: int) -> npt.NDArray[np.uint8]:
        """As it lies in a slot."""
        return np.concatenate([self.bytes[at + number * step :][:size] for at, step, size in self._rows])

    def put(self, number: int, content: npt.NDArray[np.uint8]) -> None:
        done = 0
        for at, step, size in self._rows:
            self.bytes[at + number * step :][:size] = content[done : done + size]
            done += size

    def differing(self) -> int:
        """Bytes."""
        if self._kv.device == "cuda":
            torch.cuda.synchronize()
        return int((self._kv.buffer.cpu().numpy() != self.bytes).sum())
