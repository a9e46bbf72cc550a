"""Attention with known truth: keys that are smooth along the context (AR(1), as keys after RoPE tend to be) or not at
all, and queries that ask for some of them. A single needle in smooth keys is found by everybody; many at once, or rough
keys, tell indexes apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.index.base import KeyIndex


@dataclass(frozen=True)
class Planted:
    """`keys`: [1, 1, N, D]; `query`: [1, 1, 1, D], scaled already, `needles`: [M] the tokens that it asks for."""

    keys: torch.Tensor
    query: torch.Tensor
    needles: torch.Tensor

    @property
    def truth(self) -> torch.Tensor:
        """[N] attention."""
        return (self.query[0, 0] @ self.keys[0, 0].T)[0].softmax(0)


def planted(seed: int, *, needles: int, rho: float = 0.9, tokens: int = 8192, dim: int = 128) -> Planted:
    """The query is the shortest that gives each needle a logit of 10."""
    chance = torch.Generator().manual_seed(seed)
    keys = smooth(torch.randn(tokens, dim, generator=chance), rho)
    at = torch.randperm(tokens, generator=chance)[:needles]
    query = torch.linalg.pinv(keys[at]) @ torch.full((needles,), 10.0)
    return Planted(keys[None, None], query[None, None, None], at)


def smooth(noise: torch.Tensor, rho: float) -> torch.Tensor:
    """AR(1) along the first axis, of variance 1 in the long run: the filter 1/(1 - rho z) by doubling."""
    keys = noise * (1 - rho**2) ** 0.5
    step = 1
    while rho**step > 1e-8 and step < len(keys):
        keys = keys + torch.cat([torch.zeros_like(keys[:step]), keys[:-step]]) * rho**step
        step *= 2
    return keys


def chosen(index: KeyIndex, case: Planted, share: float, page: int) -> torch.Tensor:
    """[N] bool: the tokens that a step would attend over at this share of the context: by token if `page` is 1, else
    whole pages by the sum of their tokens' estimated attention."""
    scores = index.score(case.query)[0, 0, 0]
    if index.granularity == "token" and page > 1:
        scores = scores.softmax(0).unflatten(0, (-1, page)).sum(-1)
    best = scores.topk(round(share * len(scores))).indices
    picked = torch.zeros(len(scores), dtype=torch.bool)
    picked[best] = True
    return picked.repeat_interleave(case.keys.shape[2] // len(scores))
