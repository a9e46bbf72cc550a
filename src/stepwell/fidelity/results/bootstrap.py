"""Intervals for means over tokens of several documents. Pure.

Tokens of a document are not independent of each other, so documents are resampled, each with all its tokens (cluster
bootstrap, percentiles); of two policies, the same documents for both (paired).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.demo.results.measure import RESAMPLES
from stepwell.demo.results.stats import Estimate

Sums = tuple[Sequence[float], Sequence[float]]
"""For each document, the sum over its tokens and their number."""


def ratio(sums: Sequence[float], counts: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over all tokens. Raises ValueError for no documents or no tokens. One document has no interval: it is as
    wide as a point."""
    total, drawn = _resampled((sums, counts), seed)
    return _estimate(total, drawn, len(sums))


def difference(first: Sums, second: Sums, seed: int = 0) -> Estimate:
    """The first mean less the second one, of the same documents in the same order. Raises ValueError as `ratio`, and
    for unequal numbers of documents."""
    if len(first[0]) != len(second[0]):
        raise ValueError(f"{len(first[0])} documents cannot be paired with {len(second[0])}")
    (a, drawn_a), (b, drawn_b) = _resampled(first, seed), _resampled(second, seed)
    return _estimate(a - b, drawn_a - drawn_b, len(first[0]))


def _resampled(sums: Sums, seed: int) -> tuple[float, npt.NDArray[np.float64]]:
    above, below = (np.asarray(part, np.float64) for part in sums)
    if not below.sum():
        raise ValueError("nothing was measured")
    chosen = np.random.default_rng(seed).integers(0, len(above), (RESAMPLES, len(above)))
    tokens = below[chosen].sum(axis=1)
    drawn = np.divide(above[chosen].sum(axis=1), tokens, out=np.full(RESAMPLES, np.nan), where=tokens > 0)
    return float(above.sum() / below.sum()), drawn


def _estimate(value: float, drawn: npt.NDArray[np.float64], count: int) -> Estimate:
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return Estimate(value, float(low), float(high), count)
