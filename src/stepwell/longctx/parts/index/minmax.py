"""The least and the greatest of each channel of a page's keys: Quest (arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.index.base import Granularity
from stepwell.longctx.parts.index.stored import Stored
from stepwell.longctx.parts.numbers import half_above, half_below
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class MinMax:
    """Scores a page with sum_i max(q_i least_i, q_i greatest_i): no token of the page has a greater q.k, up to the
    rounding of float32 (for float32 keys: within fp16's range). Kept in the dtype of the keys; of float32 keys in fp16,
    rounded outwards."""

    def build(self, shape: PageShape) -> Corners:
        return Corners(shape)


class Corners(Stored):
    """`KeyIndex` of least and greatest keys."""

    granularity: Granularity = "page"

    def __init__(self, shape: PageShape) -> None:
        super().__init__(shape, each=1)

    def add(self, keys: torch.Tensor) -> None:
        pages = keys.unflatten(2, (-1, self.shape.tokens))
        least, greatest = pages.amin(3), pages.amax(3)
        if keys.dtype == torch.float32:
            least, greatest = half_below(least), half_above(greatest)
        self.extend(least, greatest)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        if self.empty:
            return self.nothing(query)
        query = query.detach().float()
        # Where q_i is negative the least channel gives the greater product.
        return query.clamp(max=0.0) @ self.used(0).float().mT + query.clamp(min=0.0) @ self.used(1).float().mT
