"""From logits to the mass of pages: what selectors rank and what the accuracy alarm is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stepwell.longctx.parts.index.base import Granularity
from stepwell.longctx.parts.select.base import Candidates


@dataclass(frozen=True, slots=True)
class Masses:
    """`mass`: [L, H, G, n], each page's share of the attention. `whole`: [L, H, G], the log-sum-exp of everything.
    `allowed`: [L, n] bool, pages that are not padding only; None: all."""

    mass: torch.Tensor
    whole: torch.Tensor
    allowed: torch.Tensor | None

    def score(self, always: torch.Tensor | None = None) -> torch.Tensor:
        """[L, n]: by which pages are ranked. `always`: [L, n] bool, pages that rank before all others."""
        score = self.mass.amax(2).sum(1)
        if always is not None:
            score = score + always * (1.0 + self.mass.shape[1])
        if self.allowed is not None:
            score = score.masked_fill(~self.allowed, -torch.inf)
        return score


def weigh(
    logits: torch.Tensor,
    hot_lse: torch.Tensor,
    *,
    granularity: Granularity,
    scale: float,
    softcap: float | None,
    page_tokens: int,
    valid: torch.Tensor | None = None,
) -> Masses:
    """`logits`: q.k as a key index tells it, [L, H, G, N or n]; `hot_lse`: [L, H, G], the log-sum-exp of what is
    attended anyway. `valid`: [L, N] bool, False for padding.

    Softmax per query head first, then the greatest of a KV head's group, else one head's scale would decide for all;
    a page's mass is the sum over its tokens.
    """
    scaled = logits * scale
    if softcap is not None:
        scaled = (scaled / softcap).tanh() * softcap
    allowed = None
    if valid is not None:
        by_page = valid.view(valid.shape[0], -1, page_tokens)
        allowed = by_page.any(-1)
        seen = valid if granularity == "token" else allowed
        scaled = scaled.masked_fill(~seen[:, None, None], -torch.inf)
    weight = math.log(page_tokens) if granularity == "page" else 0.0
    whole = torch.logaddexp(torch.logsumexp(scaled, -1) + weight, hot_lse)
    mass = (scaled + (weight - whole[..., None])).exp()
    if granularity == "token" and page_tokens > 1:
        mass = mass.unflatten(-1, (-1, page_tokens)).sum(-1)
    return Masses(mass, whole, allowed)


def estimate(
    logits: torch.Tensor,
    hot_lse: torch.Tensor,
    *,
    granularity: Granularity,
    scale: float,
    softcap: float | None,
    page_tokens: int,
    tokens: int,
    valid: torch.Tensor | None = None,
    always: torch.Tensor | None = None,
) -> Candidates:
    """A selector's input, by `weigh`. `always`: [L, n] bool, pages that rank before all others (the first real tokens
    of padded rows)."""
    found = weigh(
        logits,
        hot_lse,
        granularity=granularity,
        scale=scale,
        softcap=softcap,
        page_tokens=page_tokens,
        valid=valid,
    )
    hot = (hot_lse - found.whole).exp()
    return Candidates(found.mass, hot, found.score(always), tokens, page_tokens)
