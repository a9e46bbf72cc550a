"""Is it worth recalling? Each request's question is put to `policies.decide`, and how it went is told afterwards.

a run is known ──► decide ──► RecallDecided ──► blocks land: still worth it? ──► taken, given up ──► RecallEnded
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from stepwell.block.tier import HOST
from stepwell.events import Expected, RecallDecided, RecallEnded
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.sessions.costs import Costs
from stepwell.hierarchy.sessions.decision import EngineLoad, OpenDecision
from stepwell.policies.decide import (
    Cost,
    RecallMode,
    RecallQuestion,
    Stretch,
    Why,
    cost_of,
    decide,
    least_cost,
)

MAX_TOKENS = 1 << 26
_MODES = {mode.value: mode for mode in RecallMode}


class Weighing:
    """`mode` decides where a request has no wish of its own."""

    def __init__(self, core: Core, costs: Costs, stack: Stack, mode: RecallMode) -> None:
        self._clock = core.clock
        self._started = core.clock.now()
        self._emit = core.emit
        self._costs = costs
        self._stack = stack
        self._default = mode
        self._numbers = count(1)

    def mode(self, wish: str) -> RecallMode:
        return _MODES.get(wish, self._default)

    def follow(self, mode: RecallMode) -> None:
        """From now on this mode decides where a request has no wish of its own."""
        self._default = mode

    def weigh(
        self,
        load: EngineLoad,
        order: int,
        mode: RecallMode,
        tokens: int,
        block_tokens: int,
        stretches: tuple[Stretch, ...],
    ) -> OpenDecision:
        """`tokens`: of the prompt, as its engine says. `stretches`: where its leading run lies."""
        tag = load.tag
        blocks = sum(stretch.blocks for stretch in stretches)
        tokens = min(max(tokens, blocks * block_tokens, 1), MAX_TOKENS)
        queued = self._stack.ahead(order)
        request = RecallQuestion(tokens, block_tokens, stretches, queued, load.busy_s(self._clock.now()))
        known = self._costs.known(tag, tokens, self._stack.speeds)
        decision = decide(request, known, mode)
        now = self._clock.now()
        rest_s = decision.chosen.compute_s if decision.chosen is not None else 0.0
        load.compute(now, rest_s)
        weighed = OpenDecision(next(self._numbers), load, request, mode, decision, now, now, 0, rest_s)
        by_tier: dict[str, int] = {}
        for stretch in stretches:
            by_tier[stretch.tier] = by_tier.get(stretch.tier, 0) + stretch.blocks
        doubt = max((known.forgiven(tier) for tier in by_tier if tier != HOST), default=known.doubt)
        self._emit(
            RecallDecided(
                weighed.number,
                now - self._started,
                tokens,
                block_tokens,
                by_tier,
                queued,
                decision.blocks,
                decision.why.value,
                decision.limit_s,
                doubt,
                request.busy_s,
                _expected(decision.chosen),
                _expected(decision.whole),
                decision.none.compute_s if decision.none is not None else None,
            )
        )
        return weighed

    def late(self, weighed: OpenDecision, order: int, landed: int) -> bool:
        """`landed` blocks are in the arena by now: is the rest not worth waiting for any more?"""
        if landed == weighed.landed:
            return False
        weighed.landed, weighed.landed_at = landed, self._clock.now()
        if weighed.mode is not RecallMode.DEFAULT or weighed.decision.none is None:
            return False
        rest = _behind(weighed.request.stretches, landed, weighed.decision.blocks)
        busy_s = weighed.load.busy_s(self._clock.now()) - weighed.rest_s  # its own rest is among that
        queued = self._stack.ahead(order)
        request = replace(weighed.request, stretches=rest, queued=queued, busy_s=max(0.0, busy_s))
        known = self._costs.known(weighed.load.tag, request.tokens, self._stack.speeds)
        again = decide(request, known)
        if again.why is not Why.RECOMPUTE_CHEAPER or again.blocks > landed:
            return False
        weighed.gave_up = "late"
        return True

    def ended(self, weighed: OpenDecision, recalled: int, waited_s: float) -> None:
        """The engine has taken so many blocks, and its request has waited so long for them; 0: it did not need them."""
        waited_s = waited_s if 0 <= waited_s < 1e6 else 0.0
        wanted = weighed.decision.blocks
        if waited_s and recalled < wanted and not weighed.gave_up:
            weighed.gave_up = "limit"
        regret_s = best_s = None
        if not waited_s:
            weighed.load.until -= weighed.rest_s
        known = self._costs.known(weighed.load.tag, weighed.request.tokens, self._stack.speeds)
        if waited_s and known.prefill is not None:
            best_s = least_cost(weighed.request, known).seconds
            took = cost_of(weighed.request, known, min(recalled, weighed.request.blocks))
            regret_s = max(0.0, max(waited_s + took.copy_s, took.busy_s) + took.compute_s - best_s)
        self._emit(
            RecallEnded(
                weighed.number,
                recalled,
                waited_s,
                weighed.landed_at - weighed.began,
                weighed.gave_up if waited_s else "",
                regret_s,
                best_s,
            )
        )


def _expected(cost: Cost | None) -> Expected | None:
    return Expected(cost.blocks, cost.recall_s, cost.compute_s) if cost is not None else None


def _behind(stretches: tuple[Stretch, ...], landed: int, wanted: int) -> tuple[Stretch, ...]:
    """The first `wanted` blocks when the first `landed` of them are in the arena."""
    found: list[Stretch] = []
    at = 0
    for stretch in stretches:
        for start, end, tier in ((at, landed, HOST), (max(at, landed), wanted, stretch.tier)):
            blocks = min(end, at + stretch.blocks) - start
            if blocks > 0:
                found.append(Stretch(tier, blocks, stretch.nbytes * blocks // stretch.blocks))
        at += stretch.blocks
    return tuple(found)
