"""A linear fit of times that were measured on a shared machine.

Times cannot be negative, their noise grows with them, and some are several times too long because of other users. So:
coefficients are at least 0, residuals are relative to the expected time, and those beyond one spread get less weight
the larger they are (P. J. Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 35,
1964), by reweighted least squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 6
"""Iterations of reweighting: after them the remaining change is far below the noise."""

HUBER = 1.0
"""Spreads within which a residual counts in full. Of 1, 1.5, 2.5 and no bound, the least bias (3 %, 4 %, 10 %, 50 %)
where one time in seven is 2 to 8 times too long, and no worse where none is."""

MIN_SPREAD = 0.02
"""Least relative spread: even the times of a quiet machine are not known better."""

SHARED_NOISE = 0.25
"""Share of the spread that no number of samples removes: those that are near in time suffer from the same neighbour."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """`coefficients`, each at least 0; `spread`: of the samples around the fit, relative, as a standard deviation."""

    coefficients: Floats
    spread: float
    _covariance: Floats

    def doubt(self, x: Floats) -> float:
        """Relative uncertainty of the expected time at `x`, as a standard deviation; at most 1. Large where no sample
        was similar."""
        expected = float(x @ self.coefficients)
        if expected <= 0:
            return 1.0
        own = self.spread * math.sqrt(max(0.0, float(x @ self._covariance @ x))) / expected
        return min(1.0, math.hypot(own, SHARED_NOISE * self.spread))


def fit(x: Floats, seconds: Floats, weights: Floats, prior: Floats, strength: float) -> Fitted:
    """Coefficients of `seconds` (n, all positive) against `x` (n x k, none negative, n >= 1).

    `weights`: how much each sample counts, at most 1. `prior`: coefficients in the right proportion to each other, not
    all 0; they count like `strength` samples (> 0), at the scale that the samples have.
    """
    prior = prior * _median(seconds / np.maximum(x @ prior, 1e-300), weights)
    expected, robust = seconds, weights
    for _ in range(ROUNDS):
        rows = x / expected[:, None]
        matrix = rows.T @ (rows * robust[:, None])
        pull = np.diag(strength / robust.sum() * np.maximum(matrix.diagonal(), 1e-300))
        coefficients = _least(matrix + pull, rows.T @ (robust * seconds / expected) + pull @ prior)
        expected = np.maximum(x @ coefficients, 1e-3 * seconds)
        off = seconds / expected - 1
        spread = max(MIN_SPREAD, 1.4826 * _median(np.abs(off), weights))
        robust = weights * np.minimum(1.0, HUBER * spread / np.maximum(np.abs(off), 1e-12))
    scale = 1 / np.sqrt((matrix + pull).diagonal())
    covariance = scale[:, None] * np.linalg.pinv((matrix + pull) * scale * scale[:, None]) * scale
    return Fitted(coefficients, spread, covariance)


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(below, below[-1] / 2)]])


def _least(matrix: Floats, right: Floats) -> Floats:
    """Minimises x.matrix.x/2 - right.x over x >= 0: of the few sets of coefficients that may be positive, the one whose
    own solution is feasible and best."""
    size = len(right)
    scale = 1 / np.sqrt(matrix.diagonal())
    matrix, right = matrix * scale * scale[:, None], right * scale
    best, least = np.zeros(size), 0.0
    for count in range(size, 0, -1):
        for chosen in combinations(range(size), count):
            part = list(chosen)
            found = np.linalg.solve(matrix[np.ix_(part, part)], right[part])
            value = -0.5 * float(right[part] @ found)
            if (found >= 0).all() and value < least:
                best, least = np.zeros(size), value
                best[part] = found
        if count == size and least < 0:
            break  # nothing is better than the solution of all
    return best * scale
