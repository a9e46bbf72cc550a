"""Costs of prefill and copies of each namespace, learned from engines' Timings.

A namespace is known by its tag at the weights as loaded: other weights of the same shapes take as long.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepwell.block.tier import HOST
from stepwell.hierarchy.saved import Calibrations, StateStore
from stepwell.io.clock import Clock
from stepwell.policies.costs.prefill import PrefillCost, PrefillFit
from stepwell.policies.costs.transfer import TierSpeed, TransferFit
from stepwell.policies.decide import KnownCosts

MAX_NAMESPACES = 64
"""Namespaces that are learned at a time, and remembered from earlier wells; the longest unheard go first."""

KEEP_EVERY_S = 60.0
"""Seconds between two saves of what was learned."""


@dataclass(slots=True)
class _Engine:
    prefill: PrefillFit
    copies: TransferFit


class Costs:
    """`earlier`: what an earlier well had learned. `in_flight`: bytes that are copied at a time."""

    def __init__(
        self,
        clock: Clock,
        in_flight: int,
        earlier: Calibrations | None = None,
        store: StateStore | None = None,
    ) -> None:
        self._clock = clock
        self._in_flight = in_flight
        self._earlier = OrderedDict(earlier or {})
        self._store = store or StateStore()
        self._kept_at = -math.inf
        self._engines: OrderedDict[bytes, _Engine] = OrderedDict()

    def heard(self, tag: bytes, steps: Iterable[tuple[int, float, float]], copies: Iterable[tuple[int, float]]) -> None:
        """Learns from what an engine of this namespace has timed."""
        engine = self._engine(tag)
        for step in steps:
            engine.prefill.observe(*step)
        for copy in copies:
            engine.copies.observe(*copy)
        now = self._clock.now()
        if now - self._kept_at >= KEEP_EVERY_S and (learned := self.learned):
            self._kept_at = now
            self._store.save_calibrations(learned)

    def known(self, tag: bytes, tokens: int, tiers: Mapping[str, TierSpeed]) -> KnownCosts:
        """The costs that matter for a prompt of so many tokens. `tiers`: speed of each tier below the arena."""
        engine = self._engine(tag)
        copies = engine.copies.speed
        speeds = tiers if copies is None else {HOST: copies, **tiers}
        return KnownCosts(engine.prefill.cost, engine.prefill.doubt(tokens), speeds)

    def weights(self, tag: bytes, tokens: int, depths: Iterable[int]) -> list[float]:
        """Time to compute each of these blocks of so many tokens, which has so many others before it, in units of a
        prompt's first block; 1 while nothing is known."""
        cost = self._engine(tag).prefill.cost
        return [cost.weight(tokens, depth * tokens) if cost is not None else 1.0 for depth in depths]

    @property
    def learned(self) -> dict[bytes, PrefillCost]:
        """Costs to remember, the latest last."""
        costs = {tag: engine.prefill.cost for tag, engine in self._engines.items()}
        found = self._earlier | {tag: cost for tag, cost in costs.items() if cost is not None}
        return dict(list(found.items())[-MAX_NAMESPACES:])

    def _engine(self, tag: bytes) -> _Engine:
        engine = self._engines.get(tag)
        if engine is None:
            engine = _Engine(PrefillFit(self._earlier.pop(tag, None)), TransferFit(self._in_flight))
            self._engines[tag] = engine
            if len(self._engines) > MAX_NAMESPACES:
                old, gone = self._engines.popitem(last=False)
                if gone.prefill.cost is not None:
                    self._earlier[old] = gone.prefill.cost
        self._engines.move_to_end(tag)
        while len(self._earlier) > MAX_NAMESPACES:
            self._earlier.popitem(last=False)
        return engine
