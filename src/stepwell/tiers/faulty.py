"""A tier that goes wrong on purpose: wraps another one and breaks what passes through, as drawn from a seed.

Each fault is one that real devices and networks show. What is promised for them: callers above see misses and refusals,
or bytes whose seal does not hold; never an exception, and never a frame of another key that still verifies.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stepwell.tiers.base import (
    Busy,
    Capacity,
    FrameKey,
    Hit,
    Lookup,
    Miss,
    MissReason,
    Read,
    Refused,
    RefusedReason,
    Stored,
    Tier,
    Write,
)


@dataclass(frozen=True, slots=True)
class TierFaults:
    """Probabilities, each of 0 to 1, drawn per call.

    fail: the device says no. busy: it says not now. short: a read ends early, noticed. flip: one bit of what was read
    is another one, unnoticed. lose: a write is confirmed and not done. slow: the call first waits `slow_s` seconds.
    """

    fail: float = 0.0
    busy: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    lose: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.1


class FaultyTier:
    """`sleep` is what a slow call waits with. `counts` says how often each fault came."""

    def __init__(self, inner: Tier, seed: int, faults: TierFaults, sleep: Callable[[float], None]) -> None:
        self._inner = inner
        self._faults = faults
        self._sleep = sleep
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(("fail", "busy", "short", "flip", "lose", "slow"), 0)

    @property
    def name(self) -> str:
        return self._inner.name

    def lookup(self, keys: Sequence[FrameKey]) -> list[Lookup]:
        answers = self._inner.lookup(keys)
        self._slow()
        if self._happens("busy"):
            return [Busy(self._faults.slow_s) for _ in keys]
        if self._happens("fail"):
            return [Miss(MissReason.FAILED) for _ in keys]
        return answers

    def read(self, key: FrameKey, into: memoryview) -> Read:
        answer = self._inner.read(key, into)
        self._slow()
        if self._happens("busy"):
            return Busy(self._faults.slow_s)
        if self._happens("fail"):
            return Miss(MissReason.FAILED)
        if not isinstance(answer, Hit):
            return answer
        if self._happens("short"):
            return Miss(MissReason.DAMAGED)
        if answer.nbytes and self._happens("flip"):
            with self._lock:
                at, bit = self._random.randrange(answer.nbytes), self._random.randrange(8)
            into.cast("B")[at] ^= 1 << bit
        return answer

    def write(self, key: FrameKey, frame: memoryview) -> Write:
        self._inner.lookup([key])  # raises where the contract says so, whatever comes
        self._slow()
        if self._happens("busy"):
            return Busy(self._faults.slow_s)
        if self._happens("fail"):
            self._inner.drop([key])
            return Refused(RefusedReason.FAILED)
        if self._happens("lose"):
            self._inner.drop([key])
            return Stored()
        return self._inner.write(key, frame)

    def drop(self, keys: Sequence[FrameKey]) -> None:
        self._slow()
        self._inner.drop(keys)

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def recover(self) -> Iterator[FrameKey]:
        return self._inner.recover()

    def close(self) -> None:
        self._inner.close()

    def _slow(self) -> None:
        if self._happens("slow"):
            self._sleep(self._faults.slow_s)

    def _happens(self, fault: str) -> bool:
        probability: float = getattr(self._faults, fault)
        with self._lock:
            happens = self._random.random() < probability
            self.counts[fault] += happens
        return happens
