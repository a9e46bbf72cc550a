"""The pages used in the last few steps: KVDrive's cache (arXiv 2605.18071) and its eviction by the current step's
attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import Uses, staying
from stepwell.longctx.parts.residency.lru import by_last_use
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Keeps the union of the pages selected in the last `steps` steps, the current one among them, and no others, even
    if there is room. If there is not enough, the pages with the least estimated mass in the current step leave first
    ("mass", lookahead eviction: a better forecast of the next step than age), or those selected longest ago ("lru").
    Pages that `warm` chose, and a page that has just become cold, count as used in the step before."""

    steps: int
    eviction: Literal["mass", "lru"] = "mass"

    def __post_init__(self) -> None:
        require(self.steps >= 1, self, "a window is at least one step")
        require(self.eviction in ("mass", "lru"), self, 'eviction is "mass" or "lru"')

    def build(self, shape: PageShape) -> WindowPages:
        return WindowPages(self.steps, by_mass=self.eviction == "mass")


class WindowPages(Uses):
    """`Residency` by a window of steps."""

    def __init__(self, steps: int, *, by_mass: bool) -> None:
        super().__init__()
        self._steps = steps
        self._by_mass = by_mass

    def rank(self, step: DecodeStep) -> torch.Tensor:
        age = self.note(step)
        rank = step.score if self._by_mass else by_last_use(age)
        return staying(rank.masked_fill(age >= self._steps, -torch.inf), step)
