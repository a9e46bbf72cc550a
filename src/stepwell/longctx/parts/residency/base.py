"""Residency: which cold pages keep a copy on the fast tier after a step. Pages never change, so dropping one
is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step of one layer. `selected`: [L, n] bool, the pages that were attended over; `score`: [L, n]
    float32, their estimated mass in this step (of all pages); `resident`: [L, n] bool, before the step. Steps are
    counted from 0."""

    number: int
    selected: torch.Tensor
    score: torch.Tensor
    resident: torch.Tensor


class Residency(Protocol):
    """Residency of one layer; keeps its own history. `n` only grows between calls of `crop`."""

    def rank(self, step: DecodeStep) -> torch.Tensor:
        """[L, n] float32: who stays, highest first, of the pages that are resident or were selected just now; the
        machine keeps as many as there is room for. -inf: not kept even if there is room."""

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        """[L, n] float32: rank of the pages to be resident when decoding begins, from the attention that the prompt's
        last tokens paid to each; -inf: not resident."""

    def crop(self, pages: int) -> None:
        """Forgets all but the first `pages`."""

    def rows(self, lanes: torch.Tensor) -> None:
        """Lane i is what lane `lanes[i]` was."""


class ResidencyKind(Protocol):
    """A residency as a policy names it: makes the residency of a layer."""

    def build(self, shape: PageShape) -> Residency: ...
