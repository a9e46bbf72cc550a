"""Least recently used goes first: the classic, and the control of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.residency.history import Uses, page_numbers, staying
from stepwell.longctx.shape import PageShape


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
