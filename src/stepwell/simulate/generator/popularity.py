"""Traces that differ in which document is asked for next: each takes one kind of policy to its limit.

- `cyclic`: one after the other, round and round. LRU has nothing below the working set; keeping a part has that part.
- `zipf`: few are popular, and stay so. Frequency is all there is to know.
- `churn`: few are popular, but others every hour. Old frequencies mislead.
- `scan`: a small set is used again and again, between bursts of documents that never return.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepwell.simulate.generator.documents import DocumentsParameters, GeneratedRequests, asked
from stepwell.simulate.generator.parameters import number
from stepwell.simulate.traces.trace import Ints


@dataclass(frozen=True, slots=True)
class Cyclic(DocumentsParameters):
    """Asks for `documents` in turn."""

    requests: int = number(12_000, 1, 2_000_000)

    def made(self, block_tokens: int) -> GeneratedRequests:
        order = np.arange(self.requests) % self.documents
        return asked(self, order, 0, block_tokens, np.random.default_rng(self.seed))


@dataclass(frozen=True, slots=True)
class Zipf(DocumentsParameters):
    """Asks for the document of rank r with a probability proportional to 1 / r**skew, behind a system prompt that all
    share."""

    documents: int = number(2_000, 1, 1_000_000)
    skew: float = number(1.0, 0, 10)
    system: int = number(2_048, 0, 1_000_000)  # tokens

    def made(self, block_tokens: int) -> GeneratedRequests:
        rng = np.random.default_rng(self.seed)
        ranks = _ranks(self.documents, self.skew, self.requests, rng)
        return asked(self, ranks, self.system, block_tokens, rng)


@dataclass(frozen=True, slots=True)
class Churn(DocumentsParameters):
    """`zipf` over the newest `documents`. After every `every` requests a new one enters as the most popular, and all
    others fall by one rank."""

    documents: int = number(500, 1, 1_000_000)
    skew: float = number(0.8, 0, 10)
    every: int = number(20, 1, 1_000_000)
    system: int = number(2_048, 0, 1_000_000)  # tokens

    def made(self, block_tokens: int) -> GeneratedRequests:
        rng = np.random.default_rng(self.seed)
        newest = self.documents - 1 + np.arange(self.requests) // self.every
        order = newest - _ranks(self.documents, self.skew, self.requests, rng)
        return asked(self, order, self.system, block_tokens, rng)


@dataclass(frozen=True, slots=True)
class Scan(DocumentsParameters):
    """Asks for `documents`, each as likely, and in bursts for about `burst` others, each once; these are the share
    `once` of all requests."""

    once: float = number(0.5, 0, 1)
    burst: int = number(50, 1, 1_000_000)

    def made(self, block_tokens: int) -> GeneratedRequests:
        rng = np.random.default_rng(self.seed)
        order = rng.integers(0, self.documents, self.requests)
        scanned = self._scanned(rng)
        order[scanned] = self.documents + np.arange(np.count_nonzero(scanned))
        return asked(self, order, 0, block_tokens, rng)

    def _scanned(self, rng: np.random.Generator) -> NDArray[np.bool_]:
        """For each request, whether it is part of a burst: spans of random length, in alternation."""
        if self.once in (0, 1):
            return np.full(self.requests, self.once == 1)
        pairs = self.requests // 2 + 1  # certainly enough, since no span is empty
        breaks = rng.geometric(min(1.0, max(1e-12, self.once / (1 - self.once) / self.burst)), pairs)
        bursts = rng.geometric(1 / self.burst, pairs)
        spans = np.stack([breaks, bursts], axis=1).ravel().clip(max=self.requests)
        ends = np.cumsum(spans).clip(max=self.requests)
        return np.repeat(np.tile([False, True], pairs), np.diff(ends, prepend=0))


def _ranks(documents: int, skew: float, requests: int, rng: np.random.Generator) -> Ints:
    """Random ranks from 0, rank r with a chance proportional to 1 / (r + 1)**skew."""
    chances = np.cumsum(1 / np.arange(1, documents + 1) ** skew)
    return np.searchsorted(chances, rng.uniform(0, chances[-1], requests), side="right").clip(max=documents - 1)
