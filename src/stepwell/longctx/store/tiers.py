"""The store that a cache uses: host memory first, and what does not fit there on one or more disks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from stepwell.config.places import DiskPlace
from stepwell.errors import CapacityError
from stepwell.longctx.store.base import PageStore
from stepwell.longctx.store.budget import Bounds
from stepwell.longctx.store.disk import DiskFile
from stepwell.longctx.store.host import HostPool
from stepwell.longctx.store.places import Numbers, check_pages, numbers
from stepwell.longctx.store.trouble import full

_SHIFT = 48
"""A place of ours: which store, above this bit; below it, the store's own place."""


class Bounded(PageStore, Protocol):
    """A store that tells how much it still takes."""

    @property
    def room(self) -> int: ...


class Tiers:
    """A PageStore over several stores. `host`, `disk`: as `Bounds.of` reads them; None for no such tier. `bounds`, in
    place of both: limits that other stores may share.

    A put goes where there is room: the host tier, then the disk with the most room, split if necessary. `wrap(name,
    store)` returns the store to use for a tier ("host", "disk"), such as one behind a modelled link. Raises ConfigError
    SW-102 (an invalid size or place) and AccessDenied SW-608 (no file can be made there); nothing is left open then.
    """

    def __init__(
        self,
        page_bytes: int,
        host: str | int | None = None,
        disk: str | Sequence[DiskPlace | str] | None = None,
        *,
        bounds: Bounds | None = None,
        threads: int = 4,
        pinned: bool = False,
        wrap: Callable[[str, Bounded], Bounded] = lambda tier, store: store,
    ) -> None:
        self.page_bytes = page_bytes
        self.pinned = pinned and torch.cuda.is_available()
        self._stores: list[Bounded] = []
        bounds = bounds or Bounds.of(host, disk)
        try:
            if bounds.host is not None:
                self._stores.append(HostPool(page_bytes, bounds.host, pinned))
            for path, budget in bounds.disks:
                self._stores.append(DiskFile(path, page_bytes, budget, threads=threads, pinned=pinned))
            self._on_disk = [isinstance(store, DiskFile) for store in self._stores]
            self._stores = [
                wrap("disk" if on_disk else "host", store)
                for on_disk, store in zip(self._on_disk, self._stores, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    @property
    def room(self) -> int:
        """Number of pages that still fit in all tiers together."""
        return sum(store.room for store in self._stores)

    def on_disk(self, places: torch.Tensor) -> torch.Tensor:
        """[m] to [m] bool: which of these lie in the disk tier, the others being in host memory."""
        which, _ = self._split(places)
        return torch.from_numpy(np.array(self._on_disk, dtype=bool)[which])

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        """Raises CapacityError SW-209 if all tiers together have no room; BackendDown SW-508 if a disk fails. Then
        nothing is stored."""
        check_pages(payload, self.page_bytes)
        stored: list[torch.Tensor] = []
        try:
            for which in self._order():
                left = payload[sum(map(len, stored)) :]
                count = min(len(left), self._stores[which].room)
                if count:
                    stored += self._try(which, left[:count])
            if sum(map(len, stored)) < len(payload):
                raise full("host or disk", "what is left of them does not hold these pages")
        except BaseException:
            for places in stored:
                self.free(places)
            raise
        return torch.cat([torch.zeros(0, dtype=torch.int64), *stored])

    def get(self, places: torch.Tensor) -> torch.Tensor:
        which, own = self._split(places)
        if len(which) and (which == which[0]).all():
            return self._stores[which[0]].get(torch.from_numpy(own))
        into = torch.empty(len(own), self.page_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        for one in np.unique(which).tolist():
            rows = which == one
            into.numpy()[rows] = self._stores[one].get(torch.from_numpy(own[rows])).numpy()
        return into

    def retain(self, places: torch.Tensor) -> None:
        """A ValueError for a place without owner may come when places of another tier have their new owner."""
        which, own = self._split(places)
        for one in np.unique(which).tolist():
            self._stores[one].retain(torch.from_numpy(own[which == one]))

    def free(self, places: torch.Tensor) -> None:
        """A ValueError for a place that has not as many owners may come when those of another tier are freed."""
        which, own = self._split(places)
        for one in np.unique(which).tolist():
            self._stores[one].free(torch.from_numpy(own[which == one]))

    def bytes_by_tier(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for store in self._stores:
            total.update(store.bytes_by_tier())
        return dict(total)

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _order(self) -> list[int]:
        return sorted(range(len(self._stores)), key=lambda one: (self._on_disk[one], -self._stores[one].room))

    def _try(self, which: int, payload: torch.Tensor) -> list[torch.Tensor]:
        """The places, or none if a filesystem has less space than was meant for us: another disk may have more."""
        try:
            return [self._stores[which].put(payload) | which << _SHIFT]
        except CapacityError:
            return []

    def _split(self, places: torch.Tensor) -> tuple[Numbers, Numbers]:
        """The store of each place, and its number there."""
        named = numbers(places)
        which = named >> _SHIFT
        if len(which) and not (which.min() >= 0 and which.max() < len(self._stores)):
            raise ValueError("a place without owner: no store has given it out")
        return which, named & (1 << _SHIFT) - 1
