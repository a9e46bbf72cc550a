"""A resident set that changes now and then, or never: ScoutAttention's recall (arXiv 2603.27138)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import Stateless, staying
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class Periodic:
    """After each `every`-th step (steps every - 1, 2 every - 1, ...), the pages with the greatest mass of those
    resident or selected become resident; after the others nothing changes. In between, selected pages that are not
    resident are attended over where they lie."""

    every: int

    def __post_init__(self) -> None:
        require(self.every >= 1, self, "a period is at least one step")

    def build(self, shape: PageShape) -> PeriodicRecalls:
        return PeriodicRecalls(self.every)


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps the pages that `warm` chose, until they are cropped."""

    def build(self, shape: PageShape) -> KeptPages:
        return KeptPages()


class PeriodicRecalls(Stateless):
    """The `Residency` of `Periodic`."""

    def __init__(self, every: int) -> None:
        self._every = every

    def rank(self, step: DecodeStep) -> torch.Tensor:
        return staying(step.score, step) if step.number % self._every == self._every - 1 else unchanged(step)


class KeptPages(Stateless):
    """The `Residency` of `Keep`."""

    def rank(self, step: DecodeStep) -> torch.Tensor:
        return unchanged(step)


def unchanged(step: DecodeStep) -> torch.Tensor:
    """Residents only, by mass in case that there is less room than there was; each of them finite."""
    return step.score.clamp(min=-1.0).masked_fill(~step.resident, -torch.inf)
