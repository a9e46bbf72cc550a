"""The tier kit on the tiers that come with it, and what the faulty one adds."""

from __future__ import annotations

from stepwell.testing.dict_tier import DictTier
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.tier_kit import Hands, TierKit, content
from stepwell.tiers.base import Reading, Tier, Writing
from stepwell.tiers.faulty import FaultyTier, TierFaults

BLOCK = 4096


class TestDictTier(TierKit):
    LIMIT = 32 << 20

    def make(self, executor: SeededExecutor) -> Tier:
        return DictTier(self.LIMIT, executor)

    def reopen(self, tier: Tier, executor: SeededExecutor) -> Tier:
        assert isinstance(tier, DictTier)
        again = DictTier(self.LIMIT, executor, tier.blocks)
        again.recover(lambda n: None)
        executor.drain()
        return again


class TestFaultyTierWithoutFaults(TierKit):
    LIMIT = 32 << 20

    def make(self, executor: SeededExecutor) -> Tier:
        return FaultyTier(DictTier(self.LIMIT, executor), 0)


def faulty(faults: TierFaults) -> tuple[FaultyTier, Hands]:
    """A tier with block 1 and 2, and faults from now on."""
    executor = SeededExecutor(3)
    tier = FaultyTier(DictTier(1 << 20, executor), 4)
    hands = Hands(tier, executor, BLOCK)
    hands.write(1, 2)
    tier.faults = faults
    return tier, hands


def test_failing() -> None:
    tier, hands = faulty(TierFaults(fail=1.0))
    assert hands.read(1) == [Reading.FAILED]
    assert hands.write(3) == [Writing.FAILED]
    assert tier.seen["fail"] == 2
    tier.faults = TierFaults()
    assert hands.has(1)
    assert not hands.has(3)


def test_one_bit_is_flipped() -> None:
    _, hands = faulty(TierFaults(flip=1.0))
    (read,) = hands.read(1)
    assert not isinstance(read, Reading)
    wrong = read ^ content(1, BLOCK)
    assert sum(int(byte).bit_count() for byte in wrong) == 1


def test_neighbours_are_swapped() -> None:
    _, hands = faulty(TierFaults(swap=1.0))
    first, second = hands.read(1, 2)
    assert not isinstance(first, Reading) and not isinstance(second, Reading)
    assert (first == content(2, BLOCK)).all()
    assert (second == content(1, BLOCK)).all()


def test_lost_writes_are_misses() -> None:
    _, hands = faulty(TierFaults(lose=1.0))
    assert hands.write(3) == [Writing.STORED]
    assert not hands.has(3)


def test_what_hangs_goes_on_when_it_is_released() -> None:
    tier, hands = faulty(TierFaults(hang=1.0))
    answers: list[list[Writing]] = []
    tier.write([hands.outgoing(3)], answers.append)
    hands.executor.drain()
    assert not answers
    tier.release()
    hands.executor.drain()
    assert answers == [[Writing.STORED]]


def test_one_seed_is_one_run() -> None:
    def run(seed: int) -> list[object]:
        executor = SeededExecutor(seed)
        tier = FaultyTier(DictTier(1 << 20, executor), seed, TierFaults(fail=0.3, lose=0.2))
        hands = Hands(tier, executor, BLOCK)
        return [(hands.write(n % 5), hands.has(n % 5)) for n in range(50)]

    assert run(5) == run(5)
    assert run(5) != run(6)
