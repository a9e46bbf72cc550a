"""Medians, percentiles and their 95 % bootstrap intervals. Pure; the same samples give the same numbers.

Medians of paired ratios are `demo.results.measure.ratio`; this module is for fidelity reports and the lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.demo.results.measure import RESAMPLES

Floats = npt.NDArray[np.float64]
_CHUNK = 4 << 20  # resampled values in memory at a time


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval, of `count` samples."""

    value: float
    low: float
    high: float
    count: int

    def plus(self, offset: float) -> Estimate:
        return Estimate(self.value + offset, self.low + offset, self.high + offset, self.count)

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.count)


def percentile(values: Sequence[float], percent: float, seed: int = 0) -> Estimate:
    """The percentile with its interval. Raises ValueError for no values."""
    samples = _samples(values)
    return _estimate(float(np.percentile(samples, percent)), _spread(samples, percent, seed), len(samples))


def median(values: Sequence[float], seed: int = 0) -> Estimate:
    """Raises ValueError for no values."""
    return percentile(values, 50, seed)


def ratio_of_percentiles(above: Sequence[float], below: Sequence[float], percent: float, seed: int = 0) -> Estimate:
    """One group's percentile over the other's, for groups without pairs; both are resampled. `count` is the smaller
    group's. Raises ValueError for an empty group."""
    a, b = _samples(above), _samples(below)
    value = float(np.percentile(a, percent) / np.percentile(b, percent))
    return _estimate(value, _spread(a, percent, seed) / _spread(b, percent, seed + 1), min(len(a), len(b)))


def mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """Raises ValueError for no values."""
    samples = _samples(values)
    return _estimate(float(samples.mean()), _means(samples, seed), len(samples))


def ratio_of_means(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Estimate:
    """Ratio of the means, as `ratio_of_percentiles` gives it for percentiles."""
    a, b = _samples(above), _samples(below)
    drawn = _means(a, seed) / _means(b, seed + 1)
    return _estimate(float(a.mean() / b.mean()), drawn, min(len(a), len(b)))


def ratio_of_paired_means(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Estimate:
    """Mean of the first values over mean of the second ones; both of a pair are drawn together, so that what they have
    in common does not widen the interval. Raises ValueError for no pairs."""
    if not pairs:
        raise ValueError("nothing was measured")
    random = np.random.default_rng(seed)
    values = np.asarray(pairs, np.float64)
    drawn = values[random.integers(0, len(values), (RESAMPLES, len(values)))].sum(axis=1)
    above, below = values.sum(axis=0)
    return _estimate(float(above / below), drawn[:, 0] / drawn[:, 1], len(values))


def _means(samples: Floats, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    return np.array([random.choice(samples, len(samples)).mean() for _ in range(RESAMPLES)])


def _samples(values: Sequence[float]) -> Floats:
    samples = np.asarray(values, np.float64)
    if not len(samples):
        raise ValueError("nothing was measured")
    return samples


def _spread(samples: Floats, percent: float, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(samples))
    parts = [
        np.percentile(random.choice(samples, (min(rows, RESAMPLES - start), len(samples))), percent, axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(parts)


def _estimate(value: float, drawn: Floats, count: int) -> Estimate:
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(value, float(low), float(high), count)
