"""A tier that goes wrong on purpose: wraps another one and breaks what passes through, as drawn from a seed.

Each fault is one that real devices and networks show. What is promised for them: callers above see misses and refusals,
or bytes whose seal does not hold; never an exception, and never a block of another id that still verifies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stepwell.block.namespace import BlockId
from stepwell.io.memory import Bytes
from stepwell.tiers.base import (
    Capacity,
    Forgotten,
    Incoming,
    Outgoing,
    ProbeDone,
    ReadDone,
    Reading,
    SharedTier,
    Tier,
    TierCounts,
    WriteDone,
    Writing,
)


@dataclass(frozen=True, slots=True)
class TierFaults:
    """Probabilities, each of 0 to 1. fail: the device says no to a call. flip: one bit of a block that was read is
    another one. swap: a block's bytes come back as those of its neighbour in the call. lose: a write is confirmed and
    not done. hang: the answer does not come before `release`."""

    fail: float = 0.0
    flip: float = 0.0
    swap: float = 0.0
    lose: float = 0.0
    hang: float = 0.0


class FaultyTier:
    """`faults` may be replaced at any time. `seen` says how often each fault came."""

    def __init__(self, inner: Tier, seed: int, faults: TierFaults = TierFaults()) -> None:
        self.faults = faults
        self.seen = dict.fromkeys(("fail", "flip", "swap", "lose", "hang"), 0)
        self._inner = inner
        self._random = random.Random(seed)
        self._held: list[Callable[[], None]] = []
        self._cleared = 0  # how often

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def counts(self) -> TierCounts:
        return self._inner.counts

    @property
    def hanging(self) -> int:
        """Calls that wait for `release`."""
        return len(self._held)

    def release(self) -> None:
        """Everything that hangs goes on."""
        held, self._held = self._held, []
        for call in held:
            call()

    def lookup(self, id: BlockId) -> bool:
        return self._inner.lookup(id)

    def touch(self, id: BlockId) -> None:
        self._inner.touch(id)

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        fails = self._happens("fail")
        if len(blocks) > 1 and self._happens("swap"):
            opens = [(block.open, block.fail) for block in blocks]
            others = zip(blocks, opens[1:] + opens[:1], strict=True)
            blocks = [replace(block, open=open, fail=fail) for block, (open, fail) in others]
        blocks = [self._flipped(block) if self._happens("flip") else block for block in blocks]

        def ended(answers: list[Reading]) -> None:
            done([Reading.FAILED] * len(answers) if fails else answers)

        self._perhaps_later(lambda: self._inner.read(blocks, ended))

    def _flipped(self, block: Incoming) -> Incoming:
        wrong = self._random.randrange(len(block.parts))
        at, bit = self._random.randrange(block.parts[wrong]), self._random.randrange(8)

        def open(part: int, frame: Bytes, segment: bytes) -> Reading:
            if part == wrong:
                frame[at] ^= 1 << bit
            return block.open(part, frame, segment)

        return replace(block, open=open)

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        fails, loses, cleared = self._happens("fail"), self._happens("lose"), self._cleared

        def ended(answers: list[Writing]) -> None:
            if fails or loses:
                for block in blocks:
                    self._inner.drop(block.id)
            done([Writing.FAILED] * len(answers) if fails else answers)

        def write() -> None:
            if cleared == self._cleared:
                self._inner.write(blocks, ended)
            else:
                done([Writing.FULL] * len(blocks))  # it hung, and was asked for before a clear

        self._perhaps_later(write)

    def drop(self, id: BlockId) -> None:
        self._inner.drop(id)

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        self._cleared += 1
        self._inner.clear(done, namespace)

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def figures(self) -> dict[str, int]:
        return self._inner.figures()

    def recover(self, done: Callable[[int], None]) -> None:
        self._inner.recover(done)

    def settle(self, done: Callable[[], None]) -> None:
        self._inner.settle(done)

    def close(self) -> None:
        self._inner.close()

    def _perhaps_later(self, call: Callable[[], None]) -> None:
        if self._happens("hang"):
            self._held.append(call)
        else:
            call()

    def _happens(self, fault: str) -> bool:
        probability: float = getattr(self.faults, fault)
        happens = self._random.random() < probability
        self.seen[fault] += happens
        return happens


class FaultySharedTier(FaultyTier):
    """The same around a tier that others write to; probes fail and hang as reads do."""

    def __init__(self, inner: SharedTier, seed: int, faults: TierFaults = TierFaults()) -> None:
        super().__init__(inner, seed, faults)
        self._shared = inner

    def probe(self, ids: Sequence[BlockId], done: ProbeDone) -> None:
        fails = self._happens("fail")

        def ended(found: Reading) -> None:
            done(Reading.FAILED if fails else found)

        self._perhaps_later(lambda: self._shared.probe(ids, ended))
