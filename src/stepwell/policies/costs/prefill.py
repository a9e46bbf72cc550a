"""Prefill time of an engine, learned from the steps that it ran.

    seconds of n new tokens behind c others = f per step + a n + b (n c + n^2 / 2)

The first term is the fixed cost of a step, the second the layers' matrices, the third attention: each new token attends
to all before it. `pairs` below is n c + n^2 / 2, summed over the requests of a step; it is the same for a prompt as for
the sum of its steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from stepwell.policies.costs.robust import Fitted, fit

MIN_SAMPLES = 4
"""Steps before an estimate is given without a calibration: an engine's first ones are slow."""

MAX_KINDS, SAMPLES = 48, 8
"""Kinds of steps remembered, by the powers of two of their tokens and contexts, and samples of each: long contexts stay
known while only short ones come."""

HALF_LIFE = 64
"""Steps after which a sample counts half."""

FROM_NOTHING, FROM_CALIBRATION = 0.1, 3.0
"""Samples that what was believed before counts for: without a calibration, that time grows with the tokens."""

MAX_TOKENS, MIN_SECONDS, MAX_SECONDS = 1 << 26, 1e-9, 1e6


def pairs(new: int, context: int) -> float:
    """Pairs of tokens that attention looks at for `new` tokens behind `context` others."""
    return new * context + new * new / 2


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """`step_s`: of every step; `token_s`; `pair_s`. `step_tokens`: most that one step computes; 0: any number."""

    step_s: float
    token_s: float
    pair_s: float
    step_tokens: int = 0

    def seconds(self, new: int, context: int = 0) -> float:
        """Seconds to prefill `new` tokens behind `context` others; 0 for none. If the last of several steps is partly
        filled, it counts in proportion: the rest of it serves other requests."""
        if new <= 0:
            return 0.0
        steps = max(1.0, new / self.step_tokens) if self.step_tokens else 1.0
        return self.step_s * steps + self.token_s * new + self.pair_s * pairs(new, context)

    def weight(self, new: int, context: int) -> float:
        """Cost of these tokens in the middle of a prompt, without the fixed cost of a step, in units of the cost of as
        many tokens at its beginning."""
        first = self.token_s * new + self.pair_s * pairs(new, 0)
        return (self.token_s * new + self.pair_s * pairs(new, context)) / first if first > 0 else 1.0


class PrefillFit:
    """Learns a PrefillCost. `calibration`: the cost that an earlier life had learned; its proportions hold until there
    are samples, its scale until there is one. Memory is bounded."""

    def __init__(self, calibration: PrefillCost | None = None) -> None:
        usable = calibration is not None and _usable(calibration)
        self._calibration = calibration if usable else None
        self._kinds: OrderedDict[tuple[int, int], deque[tuple[int, int, float, float]]] = OrderedDict()
        self._count = 0
        self._step_tokens = calibration.step_tokens if calibration is not None and usable else 0
        self._fitted: Fitted | None = None
        self._cost = self._calibration
        self._stale = True

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Adds a step of prefill: its tokens, their `pairs`, and its seconds. Impossible values are ignored."""
        possible = MIN_SECONDS <= seconds <= MAX_SECONDS
        if not (0 < tokens <= MAX_TOKENS and tokens / 2 <= pairs <= tokens * MAX_TOKENS and possible):
            return
        kind = tokens.bit_length(), int(pairs / tokens).bit_length()
        self._kinds.setdefault(kind, deque(maxlen=SAMPLES)).append((self._count, tokens, pairs, seconds))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        self._count += 1
        self._step_tokens = max(self._step_tokens, tokens)
        self._stale = True

    @property
    def cost(self) -> PrefillCost | None:
        """The cost; None while too little is known."""
        self._fit()
        return self._cost

    def doubt(self, new: int, context: int = 0) -> float:
        """Relative uncertainty of `cost` for these tokens, as a standard deviation; 1: unknown."""
        fitted = self._fit()
        if fitted is None:
            return 1.0 if self._calibration is None else 0.5
        steps = max(1.0, new / self._step_tokens)
        return fitted.doubt(np.array([steps, new, pairs(new, context)], np.float64))

    def _fit(self) -> Fitted | None:
        if self._stale:
            self._stale = False
            self._fitted = self._learn()
            if self._fitted is not None:
                step_s, token_s, pair_s = map(float, self._fitted.coefficients)
                self._cost = PrefillCost(step_s, token_s, pair_s, self._step_tokens)
        return self._fitted

    def _learn(self) -> Fitted | None:
        if self._count < (1 if self._calibration else MIN_SAMPLES):
            return None
        rows = np.array([row for kind in self._kinds.values() for row in kind], np.float64)
        x = np.column_stack([np.ones(len(rows)), rows[:, 1], rows[:, 2]])
        weights = 0.5 ** ((self._count - 1 - rows[:, 0]) / HALF_LIFE)
        known = self._calibration
        prior = np.array([known.step_s, known.token_s, known.pair_s] if known else [0.0, 1.0, 0.0])
        return fit(x, rows[:, 3], weights, prior, FROM_CALIBRATION if known else FROM_NOTHING)


def _usable(cost: PrefillCost) -> bool:
    """False for impossible numbers, which a file may contain."""
    parts = (cost.step_s, cost.token_s, cost.pair_s)
    return all(math.isfinite(part) and part >= 0 for part in parts) and any(parts) and cost.step_tokens >= 0
