"""The best pages: a fixed share of the context, or enough for a share of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require, require_share
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import best, ordered


@dataclass(frozen=True, slots=True)
class TopP:
    """The smallest set of pages that, with what is always attended, is estimated to hold `mass` of the attention, as a
    mean over the lane's query heads (top-p, as in Twilight, arXiv 2502.02770); but at least `floor` of the context (one
    page) and at most `ceiling`.

    If the estimate is right and eps is the mass left out for a head, its output is at most 2 eps max |v| off; a noise
    of d in the logits multiplies eps by up to e^2d.
    """

    mass: float
    floor: float
    ceiling: float

    def __post_init__(self) -> None:
        require(0.0 < self.mass <= 1.0, self, "mass is a share of the attention: above 0, at most 1")
        require_share(self.ceiling, self, "ceiling")
        require(0.0 <= self.floor <= self.ceiling, self, "floor is between 0 and ceiling")

    def select(self, candidates: Candidates) -> Selection:
        selectable = candidates.score > -torch.inf
        mean = candidates.mass.mean((1, 2)).masked_fill(~selectable, -1.0)
        top = mean.topk(candidates.pages(self.ceiling), dim=-1, sorted=True)
        before = candidates.hot_mass.mean((1, 2)).unsqueeze(-1) + top.values.cumsum(-1) - top.values
        wanted = before < self.mass
        wanted[:, : candidates.pages(self.floor)] = True
        return ordered(top.indices, wanted & (top.values >= 0.0))


@dataclass(frozen=True, slots=True)
class TopK:
    """The pages with the greatest score, `share` of the whole context (sinks and window not counted among them), as
    Quest, KVDrive, TTKV, ScoutAttention and YAKV select."""

    share: float

    def __post_init__(self) -> None:
        require_share(self.share, self, "share")

    def select(self, candidates: Candidates) -> Selection:
        return best(candidates.score, candidates.pages(self.share))
