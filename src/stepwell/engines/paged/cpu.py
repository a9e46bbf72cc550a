"""Copies on CPU, by numpy and two threads: over when they return."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stepwell.engines.paged.base import Copying, Fetched, Mark, Shard
from stepwell.engines.paged.compare import compare
from stepwell.engines.paged.pool import Row, pool_of
from stepwell.engines.paged.runs import check, check_whole
from stepwell.engines.paged.team import Copy, Numbers, Team
from stepwell.errors import Unsupported
from stepwell.io.memory import Bytes

INLINE_BYTES = 128 << 20
"""Bytes of recalls that a step copies before it goes on: some 10 to 25 ms. A copy beside the forward would take the
forward's time where cores are few, and the request that waits for it would wait longer."""


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
    """`layers`: one rank's pages layer by layer, each (pages, bytes of a page). `rows`: what their numbers are, for
    `errors`; without them nothing can be compared."""

    inline_bytes = INLINE_BYTES
    overlaps = False
    prepare: Callable[[Bytes], Callable[[], None]] | None = None

    def __init__(self, layers: Sequence[Bytes], rows: Sequence[Row] = ()) -> None:
        self._layers, self._rows = list(layers), tuple(rows)
        self._team = Team()
        self.num_pages = min(map(len, layers))
        self.page_bytes = sum(layer.shape[1] for layer in layers)

    def now(self) -> Mark:
        return Moment()

    def hold_back(self, pages: Collection[int]) -> None:
        pass

    def gather(self, shards: Sequence[Shard], after: Mark) -> Copying:
        began = time.monotonic()
        for shard in shards:
            check_whole(shard, self.page_bytes)
        runs = self._runs(shards, _EvenRun)
        copies = [Copy(run.slots, at, row, pages) for run in runs for row, pages, at in self._pieces(run)]
        self._team.copy(copies, self._nbytes(shards))
        return Copied(began)

    def scatter(self, shards: Sequence[Shard], after: Mark) -> Copying:
        began = time.monotonic()
        runs = self._runs(shards, _Run)
        copies = [Copy(row, pages, run.slots, at) for run in runs for row, pages, at in self._pieces(run)]
        self._team.copy(copies, self._nbytes(shards))
        return Copied(began)

    def fetch(self, pages: Sequence[int], after: Mark) -> Fetched:
        began = time.monotonic()
        if not all(0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} of {self.num_pages}")
        fetched = np.concatenate([layer[np.asarray(pages, np.int64)] for layer in self._layers], axis=1)
        return Fetched(Copied(began), fetched)

    def errors(self, fresh: Bytes, stored: Bytes) -> list[float]:
        return compare(fresh, stored, self._rows)

    def close(self) -> None:
        self._team.close()

    def _nbytes(self, shards: Sequence[Shard]) -> int:
        return sum(len(shard.pages) for shard in shards) * self.page_bytes

    def _pieces(self, run: _Run) -> Iterator[tuple[Bytes, slice | Numbers, tuple[slice, slice]]]:
        """Each layer, the run's pages of it, and where in the slab they lie."""
        at = run.place * self.page_bytes
        pages, slots = run.where, run.slot.span(len(run.pages))
        for layer in self._layers:
            size = layer.shape[1]
            yield layer, pages, (slots, slice(at, at + size))
            at += size

    def _runs(self, shards: Sequence[Shard], kind: type[_Run]) -> list[_Run]:
        """All pages of the shards, each in one run."""
        for shard in shards:
            check(shard, self.num_pages, self.page_bytes)
        runs: list[_Run] = []
        growing: dict[int, _Run] = {}  # by place
        for (slots, slot), skip, pages in shards:
            for place, page in enumerate(pages, skip):
                run = growing.get(place)
                if run is None or not run.takes(slots, slot, page):
                    growing[place] = run = kind(slots, slot, place, page)
                    runs.append(run)
        return runs


class _Steps:
    """Evenly spaced numbers, as far as they are known."""

    __slots__ = ("first", "last", "step")

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        self.step = 0

    def continued_by(self, number: int) -> bool:
        step = number - self.last
        return step == self.step if self.step else step != 0

    def add(self, number: int) -> None:
        self.step, self.last = number - self.last, number

    def span(self, count: int) -> slice:
        stop = self.first + count * (self.step or 1)
        return slice(self.first, stop if stop >= 0 else None, self.step or 1)


class _Run:
    """Page `place` of evenly spaced slots of one slab, and the engine's pages that go with them: one numpy call copies
    a layer of them all, and the fewer calls, the less two threads wait for the GIL."""

    def __init__(self, slots: Bytes, slot: int, place: int, page: int) -> None:
        self.slots, self.slot, self.place, self.pages = slots, _Steps(slot), place, [page]

    def takes(self, slots: Bytes, slot: int, page: int) -> bool:
        """True if this page continues the run; it is part of it then."""
        if slots is not self.slots or not self.slot.continued_by(slot):
            return False
        self.slot.add(slot)
        self.pages.append(page)
        return True

    @property
    def where(self) -> slice | Numbers:
        """The engine's pages as numpy takes them. Assigning to a list of them copies once, reading one copies twice."""
        return np.array(self.pages)


class _EvenRun(_Run):
    """A run whose engine pages are evenly spaced too."""

    def __init__(self, slots: Bytes, slot: int, place: int, page: int) -> None:
        super().__init__(slots, slot, place, page)
        self._page = _Steps(page)

    def takes(self, slots: Bytes, slot: int, page: int) -> bool:
        if not self._page.continued_by(page) or not super().takes(slots, slot, page):
            return False
        self._page.add(page)
        return True

    @property
    def where(self) -> slice:
        return self._page.span(len(self.pages))


def _view(tensor: Any, row: Row, num_pages: int) -> Bytes:
    """A layer's storage as (pages, bytes)."""
    import torch

    if tensor.device.type != "cpu":
        raise Unsupported(
            "SW-707",
            what="KV that is not in CPU memory cannot be copied by the processor",
            why=f"device {tensor.device}",
            fix="report this to the project",
        )
    flat = tensor.as_strided((num_pages, row.nbytes // tensor.element_size()), (row.stride // tensor.element_size(), 1))
    view: Bytes = flat.view(torch.uint8).numpy()
    return view


def open_cpu(kv_caches: Mapping[str, Any], num_pages: int) -> CpuCopies:
    """Copies for these tensors. Raises Unsupported SW-707 as `pool_of` does."""
    rows = pool_of(kv_caches, num_pages).rows
    tensors = {tensor.data_ptr(): tensor for tensor in kv_caches.values()}
    return CpuCopies([_view(tensors[row.address], row, num_pages) for row in rows], rows)
