"""Cold pages that another process owns."""

from __future__ import annotations

import contextlib

import torch

from stepwell.errors import BackendDown
from stepwell.longctx.near import wire
from stepwell.longctx.near.process import NearProcess


class NearPages:
    """A PageStore: as `Tiers` in the other process, whose errors are raised here. Where that process is gone, its pages
    are: `put`, `get` and `retain` raise BackendDown SW-509, and there is nothing to free or to close."""

    def __init__(self, process: NearProcess, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._process = process
        self._pinned = torch.cuda.is_available()
        process.call("pages", wire.Open(page_bytes))

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        return self._process.call("pages", wire.Put(self.page_bytes), [payload]).tensors[0]

    def get(self, places: torch.Tensor) -> torch.Tensor:
        return self._process.call("pages", wire.Get(self.page_bytes), [places], pinned=self._pinned).tensors[0]

    def retain(self, places: torch.Tensor) -> None:
        self._process.call("pages", wire.Retain(self.page_bytes), [places])

    def free(self, places: torch.Tensor) -> None:
        with contextlib.suppress(BackendDown):
            self._process.call("pages", wire.Free(self.page_bytes), [places])

    def bytes_by_tier(self) -> dict[str, int]:
        """Nothing, where the process is gone."""
        with contextlib.suppress(BackendDown):
            return self._process.call("pages", wire.Usage(self.page_bytes)).usage
        return {}

    def close(self) -> None:
        with contextlib.suppress(BackendDown):
            self._process.call("pages", wire.Close(self.page_bytes))
