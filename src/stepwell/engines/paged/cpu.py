"""Copies on CPU, by numpy and two threads: over when they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stepwell.engines.paged.base import Copying, Fetched, Mark, Shard
from stepwell.engines.paged.compare import compare
from stepwell.engines.paged.pool import LayerStack, Row, pool_of, stacks
from stepwell.engines.paged.runs import check, check_whole
from stepwell.engines.paged.team import Copy, Team
from stepwell.errors import Unsupported
from stepwell.io.memory import Bytes

INLINE_BYTES = 128 << 20
"""Bytes of recalls that a step copies before it goes on: some 10 to 25 ms. A copy beside the forward would take the
forward's time where cores are few, and the request that waits for it would wait longer."""

PIECE_BYTES = 4 << 20
"""Of a page's layers, what one call copies at most: two threads are done at about one time, since each waits for the
other's last piece."""


class Moment:
    """A point in time: on a CPU the engine has done all its work by then."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def seconds_after(self, earlier: Mark) -> float | None:
        assert isinstance(earlier, Moment)
        return self._at - earlier._at


class Copied:
    """A copy that has ended well."""

    done = True

    def __init__(self, began: float) -> None:
        self.seconds = time.monotonic() - began

    def wait(self) -> None:
        pass


class CpuCopies:
    """`stacks`: one rank's pages, as arrays (pages, layers, bytes of a layer's page), in the order in which a page lies
    in a slot. `rows`: what their numbers are, for `errors`; without them nothing can be compared."""

    inline_bytes = INLINE_BYTES
    overlaps = False
    prepare: Callable[[Bytes], Callable[[], None]] | None = None

    def __init__(self, stacks: Sequence[Bytes], rows: Sequence[Row] = ()) -> None:
        self._stacks = [part for stack in stacks for part in _parts(stack)]
        self._rows = tuple(rows)
        self._team = Team()
        self.num_pages = min(map(len, stacks))
        self.page_bytes = sum(stack[0].size for stack in stacks)

    def now(self) -> Mark:
        return Moment()

    def hold_back(self, pages: Collection[int]) -> None:
        pass

    def gather(self, shards: Sequence[Shard], after: Mark) -> Copying:
        began = time.monotonic()
        for shard in shards:
            check_whole(shard, self.page_bytes)
        self._team.copy([Copy(place, layers) for layers, place in self._pieces(shards)], self._nbytes(shards))
        return Copied(began)

    def scatter(self, shards: Sequence[Shard], after: Mark) -> Copying:
        began = time.monotonic()
        self._team.copy([Copy(layers, place) for layers, place in self._pieces(shards)], self._nbytes(shards))
        return Copied(began)

    def fetch(self, pages: Sequence[int], after: Mark) -> Fetched:
        began = time.monotonic()
        if not all(0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} of {self.num_pages}")
        numbers = np.asarray(pages, np.int64)
        fetched = np.concatenate([stack[numbers].reshape(len(pages), stack[0].size) for stack in self._stacks], axis=1)
        return Fetched(Copied(began), fetched)

    def errors(self, fresh: Bytes, stored: Bytes) -> list[float]:
        return compare(fresh, stored, self._rows)

    def close(self) -> None:
        self._team.close()

    def _nbytes(self, shards: Sequence[Shard]) -> int:
        return sum(len(shard.pages) for shard in shards) * self.page_bytes

    def _pieces(self, shards: Sequence[Shard]) -> Iterator[tuple[Bytes, Bytes]]:
        """Layers of a page, and their place in a slot, as arrays of the same shape: one numpy call copies them all."""
        views: dict[int, list[Bytes]] = {}  # of each slab
        for shard in shards:
            check(shard, self.num_pages, self.page_bytes)
            (slots, slot), skip, pages = shard
            if id(slots) not in views:
                views[id(slots)] = self._places(slots)
            for stack, places in zip(self._stacks, views[id(slots)], strict=True):
                for place, page in enumerate(pages, skip):
                    yield stack[page], places[slot, place]

    def _places(self, slots: Bytes) -> list[Bytes]:
        """Where the stacks lie in a slab: each (slots, pages of a slot, layers, bytes)."""
        pages, at, places = slots.reshape(len(slots), -1, self.page_bytes), 0, []
        for stack in self._stacks:
            _, layers, size = stack.shape
            places.append(pages[:, :, at : at + layers * size].reshape(*pages.shape[:2], layers, size))
            at += layers * size
        return places


def _parts(stack: Bytes) -> Iterator[Bytes]:
    """The stack's layers, as many at a time as one call copies."""
    _, count, size = stack.shape
    step = max(1, PIECE_BYTES // size)
    for first in range(0, count, step):
        yield stack[:, first : first + step]


def _view(storage: Any, stack: LayerStack, num_pages: int) -> Bytes:
    """A stack of layers as (pages, layers, bytes)."""
    import torch

    if storage.device.type != "cpu":
        raise Unsupported(
            "SW-707",
            what="KV that is not in CPU memory cannot be copied by the processor",
            why=f"device {storage.device}",
            fix="report this to the project",
        )
    span = stack.first
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    shape, strides = (num_pages, stack.count, span.nbytes), (span.stride, stack.step, 1)
    view: Bytes = whole.as_strided(shape, strides, span.address - span.buffer).numpy()
    return view


def open_cpu(kv_caches: Mapping[str, Any], num_pages: int) -> CpuCopies:
    """Copies for these tensors. Raises Unsupported SW-707 as `pool_of` does."""
    pool = pool_of(kv_caches, num_pages)
    storages = {storage.data_ptr(): storage for storage in (one.untyped_storage() for one in kv_caches.values())}
    views = [_view(storages[stack.first.buffer], stack, num_pages) for stack in stacks(pool.spans)]
    return CpuCopies(views, pool.rows)
