"""Orders by use and by age: least recently used goes first, or oldest page."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import Stateless, Uses, page_numbers, staying
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class Fifo:
    """Ranks by page number, in `warm` too: the newest pages stay, as in TTKV (arXiv 2604.19769). Sinks are no pages and
    stay hot anyway."""

    def build(self, shape: PageShape) -> Newest:
        return Newest()


class Newest(Stateless):
    """`Residency` of the newest pages."""

    def rank(self, step: DecodeStep) -> torch.Tensor:
        return staying(page_numbers(step.score).expand(step.score.shape), step)

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        numbers = page_numbers(importance).expand(importance.shape)
        return numbers.masked_fill(importance == -torch.inf, -torch.inf)


@dataclass(frozen=True, slots=True)
class LruPages:
    """Ranks by the step of the last use; of one step's pages the newer stays, as far as float32 can tell at that
    age."""

    def build(self, shape: PageShape) -> Used:
        return Used()


class Used(Uses):
    """`Residency` by last use."""

    def rank(self, step: DecodeStep) -> torch.Tensor:
        return staying(by_last_use(self.note(step)), step)


def by_last_use(age: torch.Tensor) -> torch.Tensor:
    """[L, n]: minus the age, and less than one more for newer pages."""
    return page_numbers(age) / max(1, age.shape[-1]) - age
