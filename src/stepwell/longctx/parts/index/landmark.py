"""Mean keys as landmarks: after RoPE, as in ShadowKV (arXiv 2410.21465) without its outliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.index.base import Granularity
from stepwell.longctx.parts.index.stored import Stored
from stepwell.longctx.parts.numbers import FP16_MAX
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class MeanLandmark:
    """Scores a page with q times its mean key; with `every`, which divides a page's tokens, with the best of the means
    of that many tokens each. Kept in the dtype of the keys; of float32 keys in fp16."""

    every: int | None = None

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, self, "a landmark stands for at least one token")

    def build(self, shape: PageShape) -> Means:
        every = self.every or shape.tokens
        require(shape.tokens % every == 0, self, f"`every` divides the {shape.tokens} tokens of a page")
        return Means(shape, every)


class Means(Stored):
    """`KeyIndex` of mean keys."""

    granularity: Granularity = "page"

    def __init__(self, shape: PageShape, every: int) -> None:
        super().__init__(shape, each=shape.tokens // every)
        self._every = every

    def add(self, keys: torch.Tensor) -> None:
        means = keys.unflatten(2, (-1, self._every)).mean(3)
        self.extend(means.clamp(-FP16_MAX, FP16_MAX).half() if keys.dtype == torch.float32 else means)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        if self.empty:
            return self.nothing(query)
        scores = query.detach().float() @ self.used(0).float().mT
        return scores.unflatten(-1, (-1, self._each)).amax(-1)
