"""Pages that are selected often for their age: HillInfer's hot pool (arXiv 2602.18750)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import grown, staying
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class HitRate:
    """Ranks a page by the share of the steps since its arrival in which it was selected; with `decay`, a step's weight
    is `decay` times that of the one after it. Of equal rates the page that is resident already stays.

    Swaps are of equal volume: a lane with r resident pages ranks only the r best of its candidates, all others are
    -inf. So at most as many pages enter as leave, whatever room there is. A lane without any resident page takes in the
    selected ones.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        require(self.decay is None or 0.0 < self.decay <= 1.0, self, "decay is above 0, at most 1")

    def build(self, shape: PageShape) -> HitCounts:
        return HitCounts(1.0 if self.decay is None else self.decay)


class HitCounts:
    """`Residency` by hit rate."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._hits: torch.Tensor | None = None  # [L, n] float32
        self._steps: torch.Tensor | None = None

    def rank(self, step: DecodeStep) -> torch.Tensor:
        self._hits = grown(self._hits, step.selected, 0.0) * self._decay + step.selected
        self._steps = grown(self._steps, step.selected, 0.0) * self._decay + 1.0
        rate = self._hits / self._steps
        rank = staying(torch.where(step.resident, torch.nextafter(rate, rate.new_tensor(2.0)), rate), step)
        volume = step.resident.sum(-1, keepdim=True)
        volume = torch.where(volume == 0, step.selected.sum(-1, keepdim=True), volume)
        place = rank.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return rank.masked_fill(place >= volume, -torch.inf)

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        return importance

    def crop(self, pages: int) -> None:
        if self._hits is not None and self._steps is not None:
            self._hits, self._steps = self._hits[:, :pages], self._steps[:, :pages]

    def rows(self, lanes: torch.Tensor) -> None:
        if self._hits is not None and self._steps is not None:
            self._hits, self._steps = self._hits.index_select(0, lanes), self._steps.index_select(0, lanes)
