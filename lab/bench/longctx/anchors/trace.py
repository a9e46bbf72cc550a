"""What a policy selected, step by step and layer by layer, and what residencies would have made of it. Pure but for
torch: recording needs a model, replaying does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stepwell.longctx.parts.residency.base import DecodeStep, ResidencyKind
from stepwell.longctx.parts.select.base import Candidates, Selection, Selector
from stepwell.longctx.shape import PageShape

_SHAPE = PageShape(heads=1, group=1, tokens=1, key_dim=1, value_dim=1)
"""Residencies count pages; how large they are does not matter to them."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """In one step of one layer: `selected` [L, n] bool, `score` [L, n] of all pages."""

    selected: torch.Tensor
    score: torch.Tensor


@dataclass(slots=True)
class Recorder:
    """A selector that does what `inner` does and remembers it. `found`: in the order in which layers asked."""

    inner: Selector
    found: list[Chosen] = field(default_factory=list)

    def select(self, candidates: Candidates) -> Selection:
        selection = self.inner.select(candidates)
        selected = torch.zeros_like(candidates.score, dtype=torch.bool)
        lanes, places = selection.valid.nonzero(as_tuple=True)
        selected[lanes, selection.pages[lanes, places]] = True
        self.found.append(Chosen(selected, candidates.score.clone()))
        return selection

    def steps(self, layers: int) -> list[Chosen]:
        """Of all layers, [layers * L, n]: layer by layer. Raises ValueError if not all layers asked equally often."""
        if len(self.found) % layers:
            raise ValueError(f"{len(self.found)} selections are not whole steps of {layers} layers")
        together = [self.found[at : at + layers] for at in range(0, len(self.found), layers)]
        return [Chosen(torch.cat([one.selected for one in step]), torch.cat([one.score for one in step]))
                for step in together]  # fmt: skip


def replay(
    steps: Sequence[Chosen], kind: ResidencyKind, slots: int, after: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each lane, [L]: pages that were there when they were wanted, and pages that were wanted, with room for `slots`
    pages of each; steps before `after` are not counted. Nothing is there before the first step."""
    residency = kind.build(_SHAPE)
    resident = torch.zeros_like(steps[0].selected)
    hits = wanted = torch.zeros(len(resident), dtype=torch.int64)
    for number, step in enumerate(steps):
        resident = torch.nn.functional.pad(resident, (0, step.selected.shape[1] - resident.shape[1]))
        if number >= after:
            hits = hits + (resident & step.selected).sum(1)
            wanted = wanted + step.selected.sum(1)
        rank = residency.rank(DecodeStep(number, step.selected, step.score, resident))
        rank = rank.masked_fill(~(resident | step.selected), -torch.inf)
        best = rank.topk(min(slots, rank.shape[1]), dim=1)
        resident = torch.zeros_like(resident).scatter_(1, best.indices, best.values > -torch.inf)
    return hits, wanted
