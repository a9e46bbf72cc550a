"""A policy of one's own: the best pages, and those beside the very best, since what belongs together lies together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import best
from stepwell.longctx.policies import STEPWELL

_BEFORE_ALL = 1e3
"""Above any score: a score is at most two for each KV head of a lane."""


@dataclass(frozen=True, slots=True)
class WithNeighbours:
    """As many pages as hold `share` of the context. The best `leading` of these have the pages on both sides of them
    taken along, before any other."""

    share: float
    leading: float = 0.25

    def select(self, candidates: Candidates) -> Selection:
        count = candidates.pages(self.share)
        few = min(max(1, round(self.leading * count)), candidates.score.shape[1])
        top = candidates.score.topk(few, dim=1).indices
        first = torch.zeros_like(candidates.score, dtype=torch.bool).scatter_(1, top, True)
        beside = first.clone()
        beside[:, 1:] |= first[:, :-1]
        beside[:, :-1] |= first[:, 1:]
        rank = candidates.score + beside * _BEFORE_ALL + first * _BEFORE_ALL
        return best(rank, count)


NEIGHBOURS = replace(STEPWELL, name="neighbours", selector=WithNeighbours(share=0.125))
"""What the entry point names; a function that returns a Policy would do, too."""
