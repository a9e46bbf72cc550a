"""The disk tier on a real filesystem: the tier kit, what an earlier life leaves, bounds, eviction, bad directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.io.files import SystemFiles
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.tier_kit import AnyKeys, Hands, TierKit, block_id
from stepwell.tiers.base import Tier, Writing
from stepwell.tiers.disk import tier as tier_module
from stepwell.tiers.disk.tier import DiskTier, Site

MIB = 1 << 20


def open_tier(path: Path, executor: SeededExecutor, limit: int = 64 * MIB, reserve: int = 0) -> DiskTier:
    seconds = iter(range(1_800_000_000, 1_900_000_000))
    tier = DiskTier(
        [Site(SystemFiles(path), limit, reserve)], executor, SetClock(), lambda: float(next(seconds)), AnyKeys()
    )
    tier.recover(lambda n: None)
    executor.drain()
    return tier


class TestDiskTier(TierKit):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Iterator[None]:
        self.folder = tmp_path
        yield

    def make(self, executor: SeededExecutor) -> Tier:
        return open_tier(self.folder, executor, self.LIMIT)

    def reopen(self, tier: Tier, executor: SeededExecutor) -> Tier:
        return open_tier(self.folder, executor, self.LIMIT)


def test_an_index_without_room_takes_no_more_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "MIN_INDEX", 3)
    monkeypatch.setattr(tier_module, "MIN_BLOCK", 1 << 40)
    executor = SeededExecutor(1)
    hands = Hands(open_tier(tmp_path, executor), executor, 128 * 4096)
    assert hands.write(1, 2, 3, 4) == [Writing.STORED] * 3 + [Writing.FULL]
    assert [hands.has(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    hands.tier.settle(lambda: None)
    executor.drain()
    hands.tier.close()
    monkeypatch.setattr(tier_module, "MIN_INDEX", 2)
    again = open_tier(tmp_path, executor)
    assert again.counts.errors == {"index_full": 1}
    assert not again.lookup(block_id(1))
    again.close()
