"""Controls that any selector has to beat at equal bytes: recency and chance. They use scores only to tell which pages
may be selected at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require, require_share
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import best


@dataclass(frozen=True, slots=True)
class Recent:
    """The newest pages, `share` of the context."""

    share: float

    def __post_init__(self) -> None:
        require_share(self.share, self, "share")

    def select(self, candidates: Candidates) -> Selection:
        score = candidates.score
        number = torch.arange(score.shape[-1], dtype=torch.float32, device=score.device)
        rank = number.expand(score.shape).masked_fill(score == -torch.inf, -torch.inf)
        return best(rank, candidates.pages(self.share))


@dataclass(frozen=True, slots=True)
class RandomPages:
    """Pages drawn evenly, `share` of the context. The draw depends on `seed` and the number of tokens alone: other
    pages in each step, the same in each run; each lane has its own."""

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        require_share(self.share, self, "share")
        require(0 <= self.seed < 2**31, self, "seed is not negative and below 2^31")

    def select(self, candidates: Candidates) -> Selection:
        score = candidates.score
        # torch's generator for the CPU reads 32 bits of a seed
        chance = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + candidates.tokens) & 0xFFFFFFFF)
        rank = torch.rand(score.shape, generator=chance).to(score.device)
        return best(rank.masked_fill(score == -torch.inf, -torch.inf), candidates.pages(self.share))
