"""Cold pages in host memory: slabs that are made when they are needed and never moved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from stepwell.longctx.store.gate import Gate
from stepwell.longctx.store.places import Numbers, Places, check_pages, numbers
from stepwell.longctx.store.trouble import full, limit

SLAB = 64 << 20
"""Bytes of a slab, at most; at least one page."""


class HostPool:
    """A PageStore of at most `capacity_bytes`, in whole pages. Memory that pages once had stays here for later ones.

    `pinned`: where there is a CUDA device, slabs and what `get` returns lie in page-locked memory, so that copies to
    the device can run beside the computation. `put` also takes pages from a device. Bytes are copied outside the lock;
    pages are a few hundred bytes in the worst case, so nothing here loops over them.
    """

    def __init__(self, page_bytes: int, capacity_bytes: int, pinned: bool = False) -> None:
        if page_bytes < 1 or capacity_bytes < 0:
            raise ValueError(f"pages of {page_bytes} bytes in {capacity_bytes} bytes")
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self.pinned = pinned and torch.cuda.is_available()
        self._lock = threading.Lock()
        self._gate = Gate()
        self._places = Places(capacity_bytes // page_bytes)
        self._slab_pages = max(1, min(SLAB // page_bytes, self._places.capacity))
        self._slabs: list[torch.Tensor] = []

    @property
    def room(self) -> int:
        """Pages that still fit."""
        with self._lock:
            return self._places.room

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        """Raises CapacityError SW-209: over the limit, or the system has no memory for another slab."""
        check_pages(payload, self.page_bytes)
        with self._gate:
            with self._lock:
                if len(payload) > self._places.room:
                    raise limit("host", self.capacity_bytes)
                places = self._places.take(len(payload))
                try:
                    self._grow()
                except (MemoryError, RuntimeError) as error:
                    self._places.free(places)
                    raise full("host", "the system refused memory for more pages") from error
            for slab, start, end in self._by_slab(places):
                local = places[start:end] - slab * self._slab_pages
                source = payload[start:end]
                if local[-1] - local[0] == end - start - 1:  # side by side: one copy, from any device
                    self._slabs[slab][local[0] : local[-1] + 1].copy_(source)
                else:
                    self._slabs[slab].numpy()[local] = source.cpu().numpy()
            return torch.from_numpy(places)

    def get(self, places: torch.Tensor) -> torch.Tensor:
        wanted = numbers(places)
        with self._gate:
            with self._lock:
                self._places.check(wanted)
            into = torch.empty(len(wanted), self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
            slabs = wanted // self._slab_pages
            if (slabs[1:] >= slabs[:-1]).all():
                self._gather(wanted, into)
                return into
            # Two gathers beat one scatter by far (measured: 4 to 7 times), and they do not hold the interpreter.
            order = np.argsort(slabs, kind="stable")
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            sorted_pages = torch.empty(len(wanted), self.page_bytes, dtype=torch.uint8)
            self._gather(wanted[order], sorted_pages)
            torch.index_select(sorted_pages, 0, torch.from_numpy(back), out=into)
            return into

    def retain(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._places.retain(numbers(places))

    def free(self, places: torch.Tensor) -> None:
        with self._gate, self._lock:
            self._places.free(numbers(places))

    def bytes_by_tier(self) -> dict[str, int]:
        with self._lock:
            return {"host": self._places.used * self.page_bytes}

    def close(self) -> None:
        if self._gate.close():
            self._slabs.clear()
            self._places = Places(0)

    def _grow(self) -> None:
        while (made := len(self._slabs) * self._slab_pages) < self._places.touched:
            pages = min(self._slab_pages, self._places.capacity - made)
            self._slabs.append(torch.empty(pages, self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned))

    def _gather(self, places: Numbers, into: torch.Tensor) -> None:
        for slab, start, end in self._by_slab(places):
            local = torch.from_numpy(places[start:end] - slab * self._slab_pages)
            torch.index_select(self._slabs[slab], 0, local, out=into[start:end])

    def _by_slab(self, places: Numbers) -> Iterator[tuple[int, int, int]]:
        """Of places whose slabs ascend: (slab, start, end) for each slab that some are in."""
        slabs = places // self._slab_pages
        edges = np.flatnonzero(np.diff(slabs, prepend=-1, append=-1)).tolist() if len(slabs) else []
        for start, end in pairwise(edges):
            yield int(slabs[start]), start, end
