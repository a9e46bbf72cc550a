"""Pages near the maximum: InfiniGen's rule (arXiv 2406.19707), whose figures are 4 below and at most 20 %."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require, require_share
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import best


@dataclass(frozen=True, slots=True)
class BelowMax:
    """Pages whose greatest logit is, for any head of the lane, at most `delta` below that head's greatest logit over
    the selectable pages; of them, at most `ceiling` of the context, by score."""

    delta: float = 4.0
    ceiling: float = 0.2

    def __post_init__(self) -> None:
        require(self.delta >= 0.0, self, "delta is not negative")
        require_share(self.ceiling, self, "ceiling")

    def select(self, candidates: Candidates) -> Selection:
        selectable = candidates.score > -torch.inf
        logits = candidates.logits.masked_fill(~selectable[:, None, None], -torch.inf)
        if logits.shape[-1] == 0:
            return best(candidates.score, 0)
        near = (logits >= logits.amax(-1, keepdim=True) - self.delta).any(1).any(1)
        return best(candidates.score.masked_fill(~near, -torch.inf), candidates.pages(self.ceiling))
