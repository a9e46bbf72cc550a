"""The newest pages stay: TTKV (arXiv 2604.19769), whose fast tier gives up its oldest pages first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import Stateless, page_numbers, staying
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class Fifo:
    """Ranks by page number, in `warm` too. Sinks are no pages and stay hot anyway."""

    def build(self, shape: PageShape) -> Newest:
        return Newest()


class Newest(Stateless):
    """`Residency` of the newest pages."""

    def rank(self, step: DecodeStep) -> torch.Tensor:
        return staying(page_numbers(step.score).expand(step.score.shape), step)

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        numbers = page_numbers(importance).expand(importance.shape)
        return numbers.masked_fill(importance == -torch.inf, -torch.inf)
