"""The keys themselves: the oracle, a control that no index can beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.index.base import Granularity
from stepwell.longctx.parts.index.stored import Stored
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class TrueKeys:
    """Every key as it is. Scores are exact, up to the rounding of float32; `nbytes` is the price."""

    def build(self, shape: PageShape) -> Keys:
        return Keys(shape)


class Keys(Stored):
    """`KeyIndex` of whole keys."""

    granularity: Granularity = "token"

    def __init__(self, shape: PageShape) -> None:
        super().__init__(shape, each=shape.tokens)

    def add(self, keys: torch.Tensor) -> None:
        self.extend(keys)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        if self.empty:
            return self.nothing(query)
        return query.detach().float() @ self.used(0).float().mT
