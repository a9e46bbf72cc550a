"""A selector: which cold pages a step attends over. Pure: scores in, page numbers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Candidates:
    """A selector's input for one step in one layer. `mass`: [L, H, G, n] float32, the estimated share of each query
    head's attention that falls on each cold page; with `hot_mass` [L, H, G], the share that falls on sinks and local
    window, it adds up to 1. `score`: [L, n] float32, the rank of pages: the mass, greatest of each group's heads,
    summed over the lane's KV heads; -inf for pages that may not be selected (padding only). `tokens` of the whole
    context, of which budgets are shares; `page_tokens` of a page."""

    mass: torch.Tensor
    hot_mass: torch.Tensor
    score: torch.Tensor
    tokens: int
    page_tokens: int

    def pages(self, share: float) -> int:
        """Number of pages that hold `share` of the context: at least one, at most all that there are."""
        wanted = round(share * self.tokens / self.page_tokens)
        return min(max(1, wanted), self.score.shape[-1])


@dataclass(frozen=True, slots=True)
class Selection:
    """`pages`: [L, K] int64, in ascending order of number within a lane, each once. `valid`: [L, K] bool; lanes that
    select fewer than K have False at their end, with any page number there."""

    pages: torch.Tensor
    valid: torch.Tensor


class Selector(Protocol):
    def select(self, candidates: Candidates) -> Selection:
        """Selects pages; the selection is as wide as its widest lane, and a lane without selectable pages selects
        none."""
