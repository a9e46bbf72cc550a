"""Reuse of blocks, learned from all that are remembered: a life table by age, for each class of items.

After each use an item is at risk of being used again. Its age passes through bins that widen by the square root of two.
Each bin counts the blocks that came to be at risk in it, and those that were used again in it. Their ratio is the
hazard of that age (Kaplan, Meier, "Nonparametric estimation from incomplete observations", 1958: forgotten items leave
the counts at their age, as censored). Classes are the number of uses, by powers of two.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.policies.cohorts import Cohorts

YOUNGEST_S: Final = 0.25
"""Ages below this are one bin."""

BINS: Final = 48
"""The last bin begins at 0.25 s x 2^23.5: a month."""

CLASSES: Final = 11
"""Classes of items: used once, 2 to 3 times, 4 to 7 times, ..., from 1,024 times on."""

PRIOR: Final = 0.1
"""Hazard of a bin before anything is known: the same in all, and bins widen, so that what was used last is expected
first, as with LRU; but for the very first bin, which is wider than the next."""

WEIGHT: Final = 30.0
"""Blocks that must be seen in a bin of a class before they outweigh the estimate for all classes together, which in
turn has to outweigh PRIOR."""

Rates = npt.NDArray[np.float64]

EDGES: Final[Rates] = YOUNGEST_S * 2.0 ** (np.arange(BINS) / 2)
"""Beginning of each bin but the first, which begins at 0."""


_ENDS: Final = EDGES[1:].copy()
_ENDS_LIST: Final[list[float]] = _ENDS.tolist()


def bins(ages_s: Rates) -> npt.NDArray[np.intp]:
    """The bin of each age."""
    return np.searchsorted(_ENDS, ages_s, side="right")


def class_of(uses: int) -> int:
    """The class of an item that was used so often, at least once."""
    return uses.bit_length() - 1 if uses < 1 << CLASSES else CLASSES - 1


class Reuse:
    """`used` and `used_again` for each use of a remembered item, `forgotten` when it is remembered no more.

    Its answer is `rates[class][bin]`: the most uses to be had per second of holding a block of this class and age, over
    all lengths of holding it: max over T of P(used again within T) / E[seconds held, which end with the use or with T]
    (the index of Gittins, "Bandit processes and dynamic allocation indices", 1979, of one chance; for caches: Beckmann,
    Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018)."""

    def __init__(self) -> None:
        self._risk = [[0] * BINS for _ in range(CLASSES)]
        self._again = [[0] * BINS for _ in range(CLASSES)]
        self._cohorts = Cohorts(EDGES.tolist(), self._risk)
        self._requests = 0
        self._due = 0
        self.rates = self._best()

    def tick(self, now: float) -> None:
        """Advances the time to `now`, in seconds. Once for each request, before its uses."""
        self._cohorts.advance(now)
        self._requests += 1
        if self._requests >= self._due:
            self.rates = self._best()
            self._due = self._requests + min(100, 1 + self._requests // 10)

    def used(self, now: float, row: int, blocks: int) -> None:
        """Blocks are in class `row` with this use."""
        self._cohorts.add(now, row, blocks)

    def used_again(self, last: float, row: int, blocks: int) -> None:
        """Blocks that were in class `row` since their last use, at `last`, are used again."""
        bin = self._cohorts.take(last, row, blocks)
        self._again[row][bin] += blocks

    def forgotten(self, last: float, row: int, blocks: int) -> None:
        """Blocks were forgotten: whether they are used again will not be known."""
        self._cohorts.take(last, row, blocks)

    def rate(self, row: int, age_s: float) -> float:
        """Uses per second of holding one block of this class, `age_s` seconds after its last use."""
        return float(self.rates[row, bisect_right(_ENDS_LIST, age_s)])

    def _best(self) -> Rates:
        return best_rates(hazards(np.array(self._risk, np.float64), np.array(self._again, np.float64)))


def hazards(risk: Rates, again: Rates) -> Rates:
    """Shares in [0, 1) of the blocks at risk in a bin that are used in it, for each class: shrunk towards those of all
    classes together, and these towards PRIOR."""
    pooled = (again.sum(0) + WEIGHT * PRIOR) / (risk.sum(0) + WEIGHT)
    shares: Rates = np.minimum((again + WEIGHT * pooled) / (risk + WEIGHT), 0.999)
    return shares


def best_rates(hazard: Rates) -> Rates:
    """For each class and bin: maximum, over the bins in which to give up, of uses / seconds held."""
    widths = np.diff(EDGES, append=2 * EDGES[-1])
    widths[0] = EDGES[1]
    rates = np.empty_like(hazard)
    for bin in range(BINS):
        alive = np.cumprod(1 - hazard[:, bin:], axis=1)
        before = np.concatenate((np.ones((len(hazard), 1)), alive[:, :-1]), axis=1)
        held = np.cumsum(before * widths[bin:], axis=1)
        rates[:, bin] = ((1 - alive) / held).max(axis=1)
    return rates
