"""Measurements of the demo: pairs, medians of ratios, intervals. Pure, no I/O.

A recall and the engine hit of the same prompt right after it are a pair; the ratio of a pair is free of the document's
length and, nearly, of the machine's changing speed. A pair counts only if vLLM itself reports the same number of cached
tokens for both sides, none of the recall's from the engine's own cache, none of the hit's from the connector. Where an
engine keeps no prefix itself, the answer that it has computed is the other side: of the same tokens, but not of the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import numpy as np

from stepwell.demo.wire import Answer

RESAMPLES = 2000


class Drop(StrEnum):
    """Reasons why a pair does not count."""

    NOT_RECALLED = "nothing was recalled"
    PARTLY_LOCAL = "the engine still held part of it"
    HIT_NOT_LOCAL = "asked again, the engine did not hold it"
    UNEQUAL = "unequal cached tokens"
    NOT_FROM_DISK = "host memory had all of it"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, one directly after the other. `computed`: `hit` is the answer to a prompt of which
    nothing was cached. `disk`: the recall is meant to come from there."""

    document: int
    recall: Answer
    hit: Answer
    computed: bool = False
    disk: bool = False

    @property
    def drop(self) -> Drop | None:
        if not self.recall.external_tokens:
            return Drop.NOT_RECALLED
        if self.recall.local_tokens != 0:
            return Drop.PARTLY_LOCAL
        if self.disk and not self.recall.tiers.get("disk"):
            return Drop.NOT_FROM_DISK
        if self.computed:
            return None
        if self.hit.external_tokens != 0 or not self.hit.local_tokens:
            return Drop.HIT_NOT_LOCAL
        if self.recall.cached_tokens != self.hit.cached_tokens:
            return Drop.UNEQUAL
        return None

    @property
    def ratio(self) -> float:
        return self.recall.ttft_s / self.hit.ttft_s

    @property
    def identical(self) -> bool:
        return self.recall.token_ids == self.hit.token_ids


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of `count` ratios with a 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float
    count: int


def counted(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.drop is None]


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Of pairs that are two ways to the same place."""
    return [pair.ratio for pair in pairs if not pair.computed]


def drops(pairs: Sequence[Pair]) -> dict[Drop, int]:
    """Number of dropped pairs by reason, reasons that did not occur left out."""
    reasons = [pair.drop for pair in pairs]
    return {reason: reasons.count(reason) for reason in Drop if reason in reasons}


def ratio(values: Sequence[float], seed: int = 0) -> Ratio | None:
    """Median of the values with an interval by percentile bootstrap, deterministic for a seed. None for no values."""
    if not values:
        return None
    samples = np.random.default_rng(seed).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), (2.5, 97.5))
    return Ratio(median(values), float(low), float(high), len(values))


def middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None
