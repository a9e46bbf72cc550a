"""Cold pages in host memory: slabs that are made when they are needed, never moved, and dropped when they are empty."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from stepwell.longctx.store.budget import Budget, shared
from stepwell.longctx.store.gate import StoreGate
from stepwell.longctx.store.places import Numbers, StorePlaces, check_pages, numbers
from stepwell.longctx.store.trouble import full, limit

SLAB = 64 << 20
"""Bytes of a slab, at most; at least one page."""


class HostPool:
    """A PageStore in whole pages: of at most `capacity` bytes, or of what a budget that it may share with others has
    left. Memory that pages had stays here for later ones as long as a page of the same slab is in use. Page-locked
    slabs then go to torch's own cache of such memory, which keeps them for the next.

    `pinned`: where there is a CUDA device, slabs and what `get` returns lie in page-locked memory, so that copies to
    the device can run beside the computation. `put` also takes pages from a device. Bytes are copied outside the lock;
    pages are a few hundred bytes in the worst case, so nothing here loops over them.
    """

    def __init__(self, page_bytes: int, capacity: int | Budget, pinned: bool = False) -> None:
        if page_bytes < 1:
            raise ValueError(f"pages of {page_bytes} bytes")
        self.page_bytes = page_bytes
        self._budget = shared(capacity)
        self.pinned = pinned and torch.cuda.is_available()
        self._lock = threading.Lock()
        self._gate = StoreGate()
        self._places = StorePlaces(self._budget.limit // page_bytes)
        self._slab_pages = max(1, min(SLAB // page_bytes, self._places.capacity))
        self._slabs: dict[int, torch.Tensor] = {}
        self._in_use = np.zeros(-(-self._places.capacity // self._slab_pages), np.int64)  # pages of each slab

    @property
    def room(self) -> int:
        """Number of pages that still fit."""
        with self._lock:
            return min(self._places.room, self._budget.left // self.page_bytes)

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        """Raises CapacityError SW-209: over the limit, or the system has no memory for another slab."""
        check_pages(payload, self.page_bytes)
        with self._gate:
            with self._lock:
                places = self._claim(len(payload))
                slabs = dict(self._slabs)
            try:
                self._scatter(slabs, payload, places)
            except BaseException:
                with self._lock:
                    self._release(places)
                raise
            return torch.from_numpy(places)

    def get(self, places: torch.Tensor) -> torch.Tensor:
        wanted = numbers(places)
        with self._gate:
            with self._lock:
                self._places.check(wanted)
                held = dict(self._slabs)
            into = torch.empty(len(wanted), self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            slabs = wanted // self._slab_pages
            if (slabs[1:] >= slabs[:-1]).all():
                self._gather(held, wanted, into)
                return into
            # Two gathers beat one scatter by far (measured: 4 to 7 times), and they do not hold the interpreter.
            order = np.argsort(slabs, kind="stable")
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            sorted_pages = torch.empty(len(wanted), self.page_bytes, dtype=torch.uint8)
            self._gather(held, wanted[order], sorted_pages)
            torch.index_select(sorted_pages, 0, torch.from_numpy(back), out=into)
            return into

    def retain(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._places.retain(numbers(places))

    def free(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._release(numbers(places))

    def bytes_by_tier(self) -> dict[str, int]:
        with self._lock:
            return {"host": self._places.used * self.page_bytes}

    def close(self) -> None:
        if self._gate.close():
            self._slabs.clear()
            self._budget.give(self._places.used * self.page_bytes)
            self._places = StorePlaces(0)

    def _claim(self, count: int) -> Numbers:
        if not self._budget.take(count * self.page_bytes):
            raise limit("host", self._budget.limit)
        places = self._places.take(count)
        taken = np.bincount(places // self._slab_pages)
        self._in_use[: len(taken)] += taken
        try:
            for slab in np.flatnonzero(taken).tolist():
                if slab not in self._slabs:
                    pages = min(self._slab_pages, self._places.capacity - slab * self._slab_pages)
                    made = torch.empty(pages, self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
                    self._slabs[slab] = made
        except (MemoryError, RuntimeError) as error:
            self._release(places)
            raise full("host", "the system refused memory for more pages") from error
        return places

    def _release(self, places: Numbers) -> None:
        gone = self._places.free(places)
        given = np.bincount(gone // self._slab_pages)
        left = self._in_use[: len(given)]
        left -= given
        for slab in np.flatnonzero((given > 0) & (left == 0)).tolist():
            self._slabs.pop(slab, None)  # it was not made yet where the system has no memory for it
        self._budget.give(len(gone) * self.page_bytes)

    def _scatter(self, slabs: dict[int, torch.Tensor], payload: torch.Tensor, places: Numbers) -> None:
        for slab, start, end in self._by_slab(places):
            local = places[start:end] - slab * self._slab_pages
            source = payload[start:end]
            if local[-1] - local[0] == end - start - 1:  # side by side: one copy, from any device
                slabs[slab][local[0] : local[-1] + 1].copy_(source)
            else:
                slabs[slab].numpy()[local] = source.cpu().numpy()

    def _gather(self, slabs: dict[int, torch.Tensor], places: Numbers, into: torch.Tensor) -> None:
        for slab, start, end in self._by_slab(places):
            local = torch.from_numpy(places[start:end] - slab * self._slab_pages)
            torch.index_select(slabs[slab], 0, local, out=into[start:end])

    def _by_slab(self, places: Numbers) -> Iterator[tuple[int, int, int]]:
        """(slab, start, end) for each slab with some of the places, whose slabs must ascend."""
        slabs = places // self._slab_pages
        edges = np.flatnonzero(np.diff(slabs, prepend=-1, append=-1)).tolist() if len(slabs) else []
        for start, end in pairwise(edges):
            yield int(slabs[start]), start, end
