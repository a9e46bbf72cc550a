"""Selections that are made up: a key index that says what a trace wants, at the price of one that looks.

Random weights select nothing sensible, but what is moved depends on what is selected. So each layer's index scores all
of its keys, as it always does, and then lets the pages of a trace win: a set of pages of which a share is new in each
step, as was measured on real documents. What the layer before foretells is the same but for a share that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stepwell.longctx.parts.index.base import IndexKind, KeyIndex
from stepwell.longctx.shape import PageShape

_WINS = 1e4
"""Above any score of random keys; scores are multiplied by the attention's scale afterwards."""


@dataclass(slots=True)
class Trace:
    """`share`: of the pages, selected in a step; `fresh`: of those, new since the step before; `wrong`: of what is
    foretold. Whoever decodes sets `step`. From layer `foretold_from` on (None: nowhere) the first question of a step is
    the prediction's, the second one the actual query's."""

    inner: IndexKind
    share: float
    fresh: float
    wrong: float
    foretold_from: int | None = None
    step: int = 0
    made: int = 0

    def build(self, shape: PageShape) -> Injected:
        """Layers are built in their order."""
        self.made += 1
        return Injected(self, self.inner.build(shape), shape.tokens, layer=self.made - 1)


@dataclass(slots=True)
class _Now:
    step: int = -1
    asked: int = 0
    pages: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class Injected:
    """Its `KeyIndex`, of one layer; the same pages for all lanes."""

    def __init__(self, trace: Trace, inner: KeyIndex, page_tokens: int, layer: int) -> None:
        self.granularity = inner.granularity
        self._trace, self._inner = trace, inner
        self._each = page_tokens if inner.granularity == "token" else 1
        self._random = torch.Generator().manual_seed(layer)
        self._foretold = trace.foretold_from is not None and layer >= trace.foretold_from
        self._now = _Now()

    def add(self, keys: torch.Tensor) -> None:
        self._inner.add(keys)

    def score(self, query: torch.Tensor) -> torch.Tensor:
        found = self._inner.score(query)
        chosen = self._chosen(found.shape[-1] // self._each).to(found.device)
        wanted = torch.zeros(found.shape[-1] // self._each, device=found.device).index_fill_(0, chosen, _WINS)
        return found + wanted.repeat_interleave(self._each)

    def _chosen(self, pages: int) -> torch.Tensor:
        """[K]: of this step, or what was foretold of it."""
        now, trace = self._now, self._trace
        count = max(1, round(trace.share * pages))
        if now.step != trace.step:
            now.pages = self._changed(now.pages, pages, count, trace.fresh if len(now.pages) else 1.0)
            now.step, now.asked = trace.step, 0
        now.asked += 1
        if self._foretold and now.asked == 1:
            return self._changed(now.pages, pages, count, trace.wrong)
        return now.pages

    def _changed(self, old: torch.Tensor, pages: int, count: int, share: float) -> torch.Tensor:
        """`count` pages of which about `share` are not among the old ones."""
        kept = old[torch.randperm(len(old), generator=self._random)[: round((1 - share) * count)]]
        others = torch.ones(pages, dtype=torch.bool).index_fill_(0, old, False).nonzero()[:, 0]
        new = others[torch.randperm(len(others), generator=self._random)[: count - len(kept)]]
        return torch.cat([kept, new])

    def crop(self, pages: int) -> None:
        self._inner.crop(pages)
        self._now = _Now()

    def rows(self, lanes: torch.Tensor) -> None:
        self._inner.rows(lanes)

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes
