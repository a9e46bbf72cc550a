"""The tier kit on the tiers that come with it, and what the faulty one adds."""

from __future__ import annotations

import random

import pytest

from stepwell.testing.dict_tier import DictTier
from stepwell.testing.tier_kit import TierKit, key
from stepwell.tiers.base import Busy, Capacity, Hit, Miss, MissReason, Refused, RefusedReason, Stored, Tier
from stepwell.tiers.faulty import FaultyTier, TierFaults
from stepwell.tiers.null import NullTier


def _no_sleep(seconds: float) -> None:
    raise AssertionError("nothing is slow here")


class TestNullTier(TierKit):
    keeps = False

    def make(self) -> Tier:
        return NullTier()


class TestDictTier(TierKit):
    def make(self) -> Tier:
        return DictTier(self.LIMIT)

    def reopen(self, tier: Tier) -> Tier:
        left = {key(n): self.frame(n) for n in range(8) if n != 3}
        return DictTier(self.LIMIT, left)


class TestFaultyTierWithoutFaults(TierKit):
    def make(self) -> Tier:
        return FaultyTier(DictTier(self.LIMIT), 0, TierFaults(), _no_sleep)


FRAME = bytes(range(256)) * 8


def _faulty(faults: TierFaults) -> FaultyTier:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    inner = DictTier(1 << 20)
    inner.write(key(1), memoryview(FRAME))
    return FaultyTier(inner, seed, faults, _no_sleep)


def test_failing() -> None:
    tier = _faulty(TierFaults(fail=1.0))
    assert tier.lookup([key(1), key(2)]) == [Miss(MissReason.FAILED)] * 2
    assert tier.read(key(1), memoryview(bytearray(4096))) == Miss(MissReason.FAILED)
    assert tier.write(key(1), memoryview(FRAME)) == Refused(RefusedReason.FAILED)
    assert tier.capacity() == Capacity(0, 1 << 20)
    assert tier.counts["fail"] == 3


def test_busy_does_nothing() -> None:
    tier = _faulty(TierFaults(busy=1.0, slow_s=0.25))
    assert tier.lookup([key(1)]) == [Busy(0.25)]
    assert tier.read(key(1), memoryview(bytearray(4096))) == Busy(0.25)
    assert tier.write(key(1), memoryview(b"other")) == Busy(0.25)
    assert tier.capacity().used == len(FRAME)


def test_short_reads_are_noticed() -> None:
    assert _faulty(TierFaults(short=1.0)).read(key(1), memoryview(bytearray(4096))) == Miss(MissReason.DAMAGED)


def test_flipped_bits_are_not_noticed_below_the_seal() -> None:
    tier = _faulty(TierFaults(flip=1.0))
    buffer = bytearray(4096)
    assert tier.read(key(1), memoryview(buffer)) == Hit(len(FRAME))
    wrong = [(a, b) for a, b in zip(FRAME, buffer, strict=False) if a != b]
    assert len(wrong) == 1
    assert (wrong[0][0] ^ wrong[0][1]).bit_count() == 1
    assert not any(buffer[len(FRAME) :])


def test_lost_writes_are_misses_and_never_older_frames() -> None:
    tier = _faulty(TierFaults(lose=1.0))
    assert tier.write(key(1), memoryview(b"new")) == Stored()
    assert tier.read(key(1), memoryview(bytearray(4096))) == Miss(MissReason.ABSENT)


def test_slow_calls_wait_with_what_they_are_given() -> None:
    slept: list[float] = []
    tier = FaultyTier(DictTier(1 << 20), 1, TierFaults(slow=1.0, slow_s=7.0), slept.append)
    tier.write(key(1), memoryview(FRAME))
    assert tier.read(key(1), memoryview(bytearray(4096))) == Hit(len(FRAME))
    tier.drop([key(1)])
    assert slept == [7.0] * 3


def test_one_seed_is_one_run() -> None:
    def run(seed: int) -> list[object]:
        tier = FaultyTier(DictTier(1 << 20), seed, TierFaults(fail=0.3, busy=0.2, flip=0.2), _no_sleep)
        buffer = bytearray(4096)
        answers: list[object] = []
        for n in range(50):
            answers.append(tier.write(key(n % 5), memoryview(FRAME)))
            answers.append(tier.read(key(n % 5), memoryview(buffer)))
            answers.append(bytes(buffer))
        return answers

    seed = random.randrange(1 << 32)
    print("seed", seed)
    assert run(seed) == run(seed)
    assert run(seed) != run(seed + 1)


@pytest.mark.parametrize("faults", [TierFaults(busy=1.0), TierFaults(fail=1.0), TierFaults(lose=1.0)])
def test_faults_do_not_hide_misuse(faults: TierFaults) -> None:
    tier = _faulty(faults)
    tier.close()
    with pytest.raises(ValueError):
        tier.write(key(1), memoryview(FRAME))
