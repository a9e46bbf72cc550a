"""The disk tier on a real filesystem: the tier kit, what an earlier life leaves, bounds, eviction, bad directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.io.files import SystemFiles
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.tier_kit import AnyKeys, TierKit
from stepwell.tiers.base import Tier
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
