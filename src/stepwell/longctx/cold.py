"""One copy, in one codec, of all pages of a layer that have stepped down."""

from __future__ import annotations

import torch

from stepwell.longctx.parts.codec.base import PageCodec
from stepwell.longctx.store.base import PageStore


class ColdPages:
    """Pages are numbered from 0 in each lane, the same count in all lanes. Owns its places in the store."""

    def __init__(self, codec: PageCodec, store: PageStore, lanes: int, device: torch.device) -> None:
        self.codec = codec
        self._store = store
        self._device = device
        self._places = torch.empty(lanes, 0, dtype=torch.int64)
        self.count = 0

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The next m pages of each lane, [L, m, H, P, D]; how many bytes that took. Raises CapacityError: then nothing
        has changed."""
        lanes, count = keys.shape[:2]
        payload = self.codec.encode(keys.flatten(0, 1), values.flatten(0, 1)).cpu()
        places = self._store.put(payload).view(lanes, count)
        if self.count + count > self._places.shape[1]:
            room = max(self.count + count, self._places.shape[1] * 3 // 2)
            grown = self._places.new_empty(lanes, room)
            grown[:, : self.count] = self._places[:, : self.count]
            self._places = grown
        self._places[:, self.count : self.count + count] = places
        self.count += count
        return payload.nbytes

    def read(self, lanes: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these pages, [m, H, P, D] each, decoded on the model's device. Raises IntegrityError."""
        return self.decode(self.payload(lanes, pages).to(self._device, non_blocking=True))

    def payload(self, lanes: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """[m, page_bytes], in host memory, as it was stored."""
        return self._store.get(self._places[lanes.cpu(), pages.cpu()])

    def decode(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codec.decode(payload)

    def crop(self, pages: int) -> None:
        if pages < self.count:
            self._store.free(self._places[:, pages : self.count].flatten())
            self.count = pages

    def rows(self, lanes: torch.Tensor) -> None:
        """Lane i is what lane `lanes[i]` was; lanes that have the same past share its pages."""
        chosen = self._places.index_select(0, lanes.cpu())
        self._store.retain(chosen[:, : self.count].flatten())
        self._store.free(self._places[:, : self.count].flatten())
        self._places = chosen

    def release(self) -> None:
        self.crop(0)
