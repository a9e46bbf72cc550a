"""Routing: which engine a request goes to."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepwell.simulate.fleet.engine import Prompt, SimulatedEngine
from stepwell.simulate.fleet.view import View
from stepwell.simulate.traces.trace import Trace


class Router(ABC):
    @abstractmethod
    def choose(self, prompt: Prompt, up: Sequence[SimulatedEngine]) -> SimulatedEngine:
        """Chooses one of the engines that are up, at least one, in the order of their numbers."""


class RandomRouter(Router):
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def choose(self, prompt: Prompt, up: Sequence[SimulatedEngine]) -> SimulatedEngine:
        return up[int(self._dice.random() * len(up))]


class RoundRobin(Router):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Prompt, up: Sequence[SimulatedEngine]) -> SimulatedEngine:
        self._next += 1
        return up[(self._next - 1) % len(up)]


class PrefixAffinity(Router):
    """Routes by the hash of a prompt's first blocks to the engine that draws the highest lot for it (Thaler,
    Ravishankar, "Using name-based mappings to increase hit rates", 1998), so that a failure moves only the prefixes of
    the engine that failed."""

    def __init__(self, trace: Trace, blocks: int) -> None:
        self._ids = trace.ids
        self._blocks = blocks

    def choose(self, prompt: Prompt, up: Sequence[SimulatedEngine]) -> SimulatedEngine:
        last = min(prompt.last, prompt.first + self._blocks)
        # Ids are chained: the last of the first few names them all. A prompt without blocks is like no other.
        key = int(self._ids[last - 1]) if last > prompt.first else -1 - prompt.number
        return max(up, key=lambda engine: (_lot(key, engine.index), engine.index))


def _lot(key: int, engine: int) -> int:
    """64 bits that look drawn (the finalizer of Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    2014)."""
    z = (key * 0x9E3779B97F4A7C15 + engine * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)


_ALL = (1 << 64) - 1


class KvAware(Router):
    """Most tokens that need not be computed, as far as `view` knows, less `weight` times those that the engine has yet
    to compute; of equals, the one with the least to compute. `places`: those of the view that each engine reaches."""

    def __init__(self, view: View, places: Sequence[Sequence[int]], block_tokens: int, weight: float) -> None:
        self._view = view
        self._places = np.array(places, np.int64)
        self._block_tokens = block_tokens
        self._weight = weight

    def choose(self, prompt: Prompt, up: Sequence[SimulatedEngine]) -> SimulatedEngine:
        # [engines, blocks]
        held: NDArray[np.bool_] = np.any(self._view.of(prompt.first, prompt.last)[self._places], axis=1)
        runs = np.cumprod(held, axis=1).sum(axis=1)
        tokens = np.minimum(runs * self._block_tokens, prompt.tokens).tolist()
        return max(
            up,
            key=lambda engine: (
                tokens[engine.index] - self._weight * engine.waiting_tokens,
                -engine.waiting_tokens,
                -engine.index,
            ),
        )
