"""Requests about documents that several of them share: the ground of the generators in `popularity`.

A prompt is the system prompt that all share, a document, and a short question. The first two are whole blocks and the
question is less than one, so that it names none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepwell.simulate.generator.parameters import number
from stepwell.simulate.traces.assemble import Columns
from stepwell.simulate.traces.chains import Blocks, starts_of
from stepwell.simulate.traces.runs import Runs
from stepwell.simulate.traces.trace import Floats, Ints


@dataclass(frozen=True, slots=True)
class DocumentsParameters:
    """Parameters that all these generators have."""

    seed: int = number(0, 0, 2**63 - 1)
    requests: int = number(20_000, 1, 2_000_000)
    documents: int = number(400, 1, 1_000_000)
    tokens: int = number(8192, 1, 1_000_000)  # median of a document; from half of it to twice
    gap: float = number(1.0, 0, 1e6)  # mean seconds between requests


class GeneratedRequests(NamedTuple):
    columns: Columns
    blocks: Blocks


def asked(
    about: DocumentsParameters, order: Ints, system_tokens: int, block_tokens: int, rng: np.random.Generator
) -> GeneratedRequests:
    """Requests for the documents `order`, numbered from 0, one after the other at random times."""
    lengths = about.tokens * 2.0 ** rng.uniform(-1, 1, int(order.max()) + 1)
    blocks = np.maximum(1, lengths // block_tokens).astype(np.int64)
    system = -(-system_tokens // block_tokens)
    counts = blocks[order]
    firsts = (system + starts_of(blocks))[order]
    if system:
        counts = np.stack([np.full_like(counts, system), counts], axis=1).ravel()
        firsts = np.stack([np.zeros_like(firsts), firsts], axis=1).ravel()
    runs = Runs(np.arange(len(order) + 1) * (2 if system else 1), firsts, counts)
    question = rng.integers(0, min(block_tokens, 256), len(order))
    outputs = rng.integers(64, 512, len(order))
    unknown = np.full(len(order), -1, np.int64)
    inputs = runs.lengths * block_tokens + question
    return GeneratedRequests(Columns(arrivals(about.gap, len(order), rng), inputs, outputs, unknown), runs.blocks())


def arrivals(gap: float, requests: int, rng: np.random.Generator) -> Floats:
    """Times of independent arrivals with `gap` seconds between them on average."""
    return np.cumsum(rng.exponential(gap, requests)) if gap else np.zeros(requests)
