"""Recall or recompute: how much of a request's leading run to recall, and the time limit for that.

    expected seconds to the first token, if the first k blocks are recalled
        = reading those below the arena and copying all k, or, if that is longer, what the engine computes for others
          before it comes to this request; + computing the tokens behind them

Each block costs its bytes, and saves more the farther back it lies, since attention makes late tokens dearer. So the
minimum lies at one of a few cuts: the ends of stretches that lie in one tier, the point where the rest fits into one
step of the engine, and the point where recalling begins to take longer than the engine is busy. Only these are
compared; the cheapest wins, and the longest of equal ones.

Uncertainty favours recalling: reading is counted shorter by the uncertainty of both estimates, so that a tier is
refused only when recomputing is cheaper by more than that. An unknown tier costs nothing: it is recalled from, and
learned. A refused tier is learned by probes that no request waits for (see `probe`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from stepwell.block.tier import HOST
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.policies.costs.transfer import TierSpeed

MAX_DOUBT = 0.5
"""Share of the reading time that may be forgiven."""

UNKNOWN_LIMIT_S = 2.0
"""Limit of a recall while the time to recompute is unknown."""


class RecallMode(Enum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Why(Enum):
    WORTH_IT = "worth_it"
    UNKNOWN = "unknown"  # there is nothing to compare yet: recalled, and learned
    RECOMPUTE_CHEAPER = "recompute_cheaper"  # all of it, or the blocks behind the cut
    ALWAYS = "always"
    NEVER = "never"
    EMPTY = "empty"  # there was nothing to recall


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive blocks of a run in one tier, with `nbytes` bytes in all."""

    tier: str
    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """A prompt of `tokens`, whose leading run lies in these stretches. `queued`: bytes that each tier was asked for
    before this; `busy_s`: seconds of others' prompts that its engine computes before this."""

    tokens: int
    block_tokens: int
    stretches: tuple[Stretch, ...]
    queued: Mapping[str, int] = field(default_factory=dict)
    busy_s: float = 0.0

    @property
    def blocks(self) -> int:
        return sum(stretch.blocks for stretch in self.stretches)


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Known costs; None or absent: unknown. `doubt`: relative uncertainty of `prefill` for this prompt."""

    prefill: PrefillCost | None = None
    doubt: float = 1.0
    speeds: Mapping[str, TierSpeed] = field(default_factory=dict)

    def forgiven(self, tier: str) -> float:
        """Share of a tier's reading time that doubt forgives."""
        speed = self.speeds.get(tier)
        return 1.0 if speed is None else min(MAX_DOUBT, math.hypot(speed.doubt, self.doubt))


class Cost(NamedTuple):
    """Seconds expected of one cut. `busy_s`: before the engine can compute the rest in any case."""

    blocks: int
    read_s: float
    copy_s: float
    compute_s: float
    forgiven_s: float = 0.0
    busy_s: float = 0.0

    @property
    def recall_s(self) -> float:
        return self.read_s + self.copy_s

    @property
    def seconds(self) -> float:
        return max(self.recall_s, self.busy_s) + self.compute_s

    @property
    def at_best(self) -> float:
        return max(self.recall_s - self.forgiven_s, self.busy_s) + self.compute_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to recall the first `blocks` and to give up after `limit_s` seconds. `chosen`, `none` and `whole`:
    expected costs of it, of recalling nothing and of recalling all; None while costs are unknown."""

    blocks: int
    why: Why
    limit_s: float
    chosen: Cost | None = None
    none: Cost | None = None
    whole: Cost | None = None


class _Costs:
    """Costs of one request, from `known`. The prefill cost must be known."""

    def __init__(self, request: RecallQuestion, known: KnownCosts) -> None:
        assert known.prefill is not None
        self._request, self._known, self._prefill = request, known, known.prefill
        self._ends = [0]  # ends of stretches, in blocks, and the bytes before each by tier
        self._before: list[dict[str, int]] = [{}]
        for tier, blocks, nbytes in ((s.tier, s.blocks, s.nbytes) for s in request.stretches if s.blocks):
            before = self._before[-1]
            self._ends.append(self._ends[-1] + blocks)
            self._before.append({**before, tier: before.get(tier, 0) + nbytes})
        self._of: dict[int, Cost] = {}

    def of(self, cut: int) -> Cost:
        """Cost of recalling exactly the first `cut` blocks."""
        cost = self._of.get(cut)
        if cost is None:
            cost = self._of[cut] = self._cost(cut)
        return cost

    def _cost(self, cut: int) -> Cost:
        request, speeds = self._request, self._known.speeds
        nbytes, read_s, copy_s, forgiven_s = 0, 0.0, 0.0, 0.0
        for tier, n in self.nbytes(cut).items():
            nbytes += n
            if tier != HOST and tier in speeds:
                seconds = speeds[tier].seconds(n, request.queued.get(tier, 0))
                read_s, forgiven_s = read_s + seconds, forgiven_s + seconds * self._known.forgiven(tier)
        if HOST in speeds:
            copy_s = speeds[HOST].seconds(nbytes)
        done = min(cut * request.block_tokens, request.tokens - 1)  # an engine computes at least the last token
        compute_s = self._prefill.seconds(request.tokens - done, done)
        return Cost(cut, read_s, copy_s, compute_s, forgiven_s, request.busy_s)

    def nbytes(self, cut: int) -> dict[str, int]:
        """Bytes of the first `cut` blocks, by tier."""
        at = bisect_left(self._ends, cut)
        if self._ends[at] == cut:
            return self._before[at]
        start, end = self._ends[at - 1], self._ends[at]
        before, after = self._before[at - 1], self._before[at]
        return {
            tier: (had := before.get(tier, 0)) + (n - had) * (cut - start) // (end - start) for tier, n in after.items()
        }

    def cuts(self) -> list[int]:
        """Cuts that may be the best."""
        blocks = self._ends[-1]
        cuts = {*self._ends, *(start + 1 for start in self._ends), blocks - 1}
        if self._prefill.step_tokens:
            fits = (self._request.tokens - self._prefill.step_tokens) / self._request.block_tokens
            cuts |= {math.floor(fits), math.ceil(fits)}
        busy_s, least = self._request.busy_s, min(1, blocks)
        for forgiven in (0, 1):
            if self._recall_s(least, forgiven) <= busy_s < self._recall_s(blocks, forgiven):  # else it is an end
                longer = bisect_right(range(blocks + 1), busy_s, key=lambda cut: self._recall_s(cut, forgiven))
                cuts |= {longer - 1, longer}
        return sorted(cut for cut in cuts if 0 <= cut <= blocks)

    def _recall_s(self, cut: int, forgiven: int) -> float:
        cost = self.of(cut)
        return cost.recall_s - forgiven * cost.forgiven_s


def decide(request: RecallQuestion, known: KnownCosts, mode: RecallMode = RecallMode.AUTO) -> Decision:
    """The cut with the least expected time to first token. Its limit is the time to compute everything: a longer wait
    would cost more than a cache may."""
    blocks = request.blocks
    if not blocks:
        return Decision(0, Why.EMPTY, UNKNOWN_LIMIT_S)
    told = {RecallMode.ALWAYS: Why.ALWAYS, RecallMode.NEVER: Why.NEVER, RecallMode.AUTO: Why.UNKNOWN}[mode]
    cut = 0 if mode is RecallMode.NEVER else blocks
    if known.prefill is None:
        return Decision(cut, told, UNKNOWN_LIMIT_S)
    costs = _Costs(request, known)
    none, whole = costs.of(0), costs.of(blocks)
    if mode is not RecallMode.AUTO:
        return Decision(cut, told, UNKNOWN_LIMIT_S, costs.of(cut), none, whole)
    best = min(map(costs.of, costs.cuts()), key=lambda cost: (cost.at_best, -cost.blocks))
    why = Why.WORTH_IT if best.blocks == blocks else Why.RECOMPUTE_CHEAPER
    if any(tier != HOST and tier not in known.speeds for tier in costs.nbytes(best.blocks)):
        why = Why.UNKNOWN
    return Decision(best.blocks, why, none.seconds, best, none, whole)


def cost_of(request: RecallQuestion, known: KnownCosts, blocks: int) -> Cost:
    """Expected cost of recalling exactly the first `blocks`. The prefill cost must be known."""
    return _Costs(request, known).of(blocks)


def least_cost(request: RecallQuestion, known: KnownCosts) -> Cost:
    """Expected cost of the best cut if `known` is exact. The prefill cost must be known."""
    costs = _Costs(request, known)
    return min(map(costs.of, costs.cuts()), key=lambda cost: (cost.seconds, -cost.blocks))
