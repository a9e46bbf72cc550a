"""The cold stores of one cache: one for each size of page, all within the same bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell.longctx.near.process import NearPages, NearProcess
from stepwell.longctx.store.base import PageStore
from stepwell.longctx.store.budget import Bounds
from stepwell.longctx.store.link import LinkQueue, ModelledLink, Throttled
from stepwell.longctx.store.tiers import Tiers

_TRIAL = 4096


class Stores:
    """Stores of one cache. `link`: a modelled link that all of them share, slower than the real one, for experiments; a
    queue's speed may be changed while it is in use. `near`: they lie in a process of their own. Raises ConfigError and
    AccessDenied as `Tiers` does: a directory that cannot be used is an error before anything is computed."""

    def __init__(
        self,
        host: int | str | None,
        disk: str | Sequence[str] | None,
        link: ModelledLink | LinkQueue | None,
        *,
        near: bool = False,
    ) -> None:
        self._bounds = Bounds.of(host or None, disk)
        self._queue = LinkQueue(link) if isinstance(link, ModelledLink) else link
        self.near = NearProcess(host, disk) if near else None
        self._by_size: dict[int, PageStore] = {}
        self._make(_TRIAL).close()

    def of(self, page_bytes: int) -> PageStore:
        """The store for pages of so many bytes. Raises BackendDown if the process that is to own it does not start."""
        if page_bytes not in self._by_size:
            store = NearPages(self.near, page_bytes) if self.near is not None else self._make(page_bytes)
            self._by_size[page_bytes] = Throttled(store, self._queue) if self._queue is not None else store
        return self._by_size[page_bytes]

    def _make(self, page_bytes: int) -> Tiers:
        return Tiers(page_bytes, bounds=self._bounds, pinned=torch.cuda.is_available())

    def bytes_by_tier(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for store in self._by_size.values():
            for tier, nbytes in store.bytes_by_tier().items():
                found[tier] = found.get(tier, 0) + nbytes
        return found

    def close(self) -> None:
        if self.near is not None:
            self.near.close()  # and with it all that it owns
        else:
            for store in self._by_size.values():
                store.close()
        self._by_size.clear()
