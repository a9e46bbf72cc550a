"""The shapes that everything here agrees on. Pure numbers; no torch.

A *lane* selects and moves pages on its own: one row of the batch with all KV heads (joint selection), or one row and
one KV head. A *page* is `page_tokens` consecutive tokens of a lane in one layer. Tensors of a layer have the axes
lanes L, KV heads of a lane H, query heads of a KV head G, pages n, tokens N, page tokens P, head dimensions D.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageShape:
    """Shape of every page of a layer. `heads`: KV heads of a lane; `group`: query heads of one KV head."""

    heads: int
    group: int
    tokens: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of K and V together."""
        return self.heads * self.tokens * (self.key_dim + self.value_dim)
