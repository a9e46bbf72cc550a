"""Attention with a known truth: the records that a query needs are planted, so an index's recall is measured directly.

Keys are noise that changes slowly along the context (AR(1) with coefficient `rho`: near 1 neighbours are alike, as
text's are; with 0 a page says nothing about its tokens). A query is the sum of its records' own directions, so that
each of `records` of them stands out less the more they are (context intensity): with one record every method looks
alike. Optional: channels in which all keys share a large value, and a mean that drifts along the context. No model; a
million tokens take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stepwell.demo.results.stats import Estimate
from stepwell.fidelity.results import bootstrap
from stepwell.fidelity.runner import granularity
from stepwell.longctx.parts.index.base import IndexKind, KeyIndex
from stepwell.longctx.shape import PageShape

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]

_ADDED = 1 << 16
"""Tokens that are made and added at a time."""
_OUTLIER_CHANNELS = 4
_SPREAD = 2.0
"""Standard deviation of the scaled logits of records that no query needs."""


@dataclass(frozen=True, slots=True)
class Construction:
    """Parameters of a construction. `strength`: the part of its own direction in a record's key, in standard deviations
    of a channel. `run`: tokens of a record. `queries`: number of queries, each with `records` of its own. `outliers`,
    `drift`: size of the shared value, and of the mean at the context's end, in the same unit."""

    tokens: int
    records: int = 1
    rho: float = 0.9
    outliers: float = 0.0
    drift: float = 0.0
    run: int = 8
    dim: int = 128
    strength: float = 12.0
    queries: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class IndexRecall:
    """Recall of an index on a construction: the share of the records' tokens that are selected at a budget, with an
    interval over queries. Bytes are for one KV head; `bytes_all_fp16`: K and V of every token."""

    made: Construction
    index: str
    page_tokens: int
    budget: float
    recall: Estimate
    index_bytes: int
    bytes_all_fp16: int

    @property
    def granularity(self) -> str:
        return granularity(self.page_tokens)

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "task": "constructed",
            **asdict(self.made),
            "index": self.index,
            "granularity": self.granularity,
            "budget": self.budget,
            "needle_recall": self.recall.value,
            "needle_recall_ci": (self.recall.low, self.recall.high),
            "index_bytes": self.index_bytes,
            "bytes_all_fp16": self.bytes_all_fp16,
        }


def measure(
    made: Construction, kinds: Mapping[str, IndexKind], page_tokens: int, budgets: Sequence[float]
) -> list[IndexRecall]:
    """Each index on the same keys and queries, with pages of `page_tokens`: where it scores tokens, the probabilities
    of a page's are summed; the best pages are selected until the budget, a share of the context, is used up. Raises
    ValueError if the records do not fit into the context."""
    pages = made.tokens // page_tokens
    count = pages * page_tokens
    if made.records * made.run * made.queries > count or not pages:
        raise ValueError(f"{made.queries} times {made.records} records do not fit into {made.tokens} tokens")
    numbers = np.random.default_rng(made.seed)
    # No two records share a token, of whatever query.
    slots = numbers.choice(count // made.run, (made.queries, made.records), replace=False)
    places = slots[..., None] * made.run + np.arange(made.run)
    directions = numbers.standard_normal((made.queries, made.records, made.dim), dtype=np.float32)
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    shape = PageShape(heads=1, group=1, tokens=page_tokens, key_dim=made.dim, value_dim=made.dim)
    built = {name: kind.build(shape) for name, kind in kinds.items()}
    for part in _keys(numbers, made, count, max(1, _ADDED // page_tokens) * page_tokens, places, directions):
        for index in built.values():
            index.add(part)
    queries = directions.sum(1)
    queries *= _SPREAD * made.dim**0.5 / np.linalg.norm(queries, axis=-1, keepdims=True)
    found = []
    for name, index in built.items():
        scores = [_page_scores(index, torch.from_numpy(query), page_tokens) for query in queries]
        for budget in budgets:
            wanted = max(1, min(pages, round(budget * made.tokens / page_tokens)))
            shares = [
                float(np.isin(of.ravel() // page_tokens, at.topk(wanted).indices.numpy()).mean())
                for at, of in zip(scores, places, strict=True)
            ]
            recall = bootstrap.ratio(shares, [1.0] * len(shares), made.seed)
            whole = 2 * made.dim * 2 * made.tokens
            found.append(IndexRecall(made, name, page_tokens, budget, recall, index.nbytes, whole))
    return found


def _keys(
    numbers: np.random.Generator, made: Construction, count: int, size: int, places: Places, directions: Floats
) -> Iterator[torch.Tensor]:
    """[1, 1, n, D], one part of `size` tokens after the other."""
    shared = np.zeros(made.dim, np.float32)
    channels = numbers.choice(made.dim, _OUTLIER_CHANNELS, replace=False)
    shared[channels] = made.outliers * numbers.choice([-1.0, 1.0], _OUTLIER_CHANNELS)
    toward = numbers.standard_normal(made.dim, dtype=np.float32)
    state = numbers.standard_normal(made.dim, dtype=np.float32)
    planted = np.repeat(made.strength * directions[..., None, :], made.run, axis=2).reshape(-1, made.dim)
    where = places.ravel()
    for start in range(0, count, size):
        length = min(size, count - start)
        keys = numbers.standard_normal((length, made.dim), dtype=np.float32)
        if made.rho:
            keys *= (1 - made.rho**2) ** 0.5
            for at in range(length):
                keys[at] += made.rho * state
                state = keys[at]
            state = state.copy()
        here = (where >= start) & (where < start + length)
        keys[where[here] - start] += planted[here]
        along = np.arange(start, start + length, dtype=np.float32)[:, None] / count
        keys += shared + made.drift * along * toward
        yield torch.from_numpy(keys)[None, None]


def _page_scores(index: KeyIndex, query: torch.Tensor, page_tokens: int) -> torch.Tensor:
    scores = index.score(query.view(1, 1, 1, -1)).flatten()
    if index.granularity == "page":
        return scores
    probable = torch.softmax(scores * query.shape[-1] ** -0.5, -1)
    return probable.view(-1, page_tokens).sum(-1)
