"""A key index: what stays on the fast tier of keys that have stepped down, to tell which pages a query needs."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from stepwell.longctx.shape import PageShape

Granularity = Literal["token", "page"]


class KeyIndex(Protocol):
    """Key index of one layer. Pages are added in order and never change; page p holds tokens p * P to (p + 1) * P - 1
    of the cold part. It counts as KV: never written anywhere in clear."""

    granularity: Granularity
    """Whether `score` tells of tokens or of pages."""

    def add(self, keys: torch.Tensor) -> None:
        """The keys of the next m pages (at least one) as attention sees them (after RoPE): [L, H, m * P, D], in any
        float type, the same each time."""

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """Estimated q.k in float32, not scaled: query [L, H, G, D] to [L, H, G, N], or [L, H, G, n] for pages, where it
        stands for each of a page's tokens. Without gradients."""

    def crop(self, pages: int) -> None:
        """Forgets all but the first `pages`."""

    def rows(self, lanes: torch.Tensor) -> None:
        """Lane i is what lane `lanes[i]` was: for beams and for batches that grow or shrink."""

    @property
    def nbytes(self) -> int:
        """Bytes on the fast tier, scales and centres included; of all lanes."""


class IndexKind(Protocol):
    """An index as a policy names it: makes the index of a layer."""

    def build(self, shape: PageShape) -> KeyIndex: ...
