"""The kit on every policy of the catalog, and what makes each of them itself."""

from __future__ import annotations

from stepwell.policies.catalog import POLICIES
from stepwell.policies.eviction.base import Eviction
from stepwell.testing.eviction_kit import EvictionKit


class Named(EvictionKit):
    POLICY = ""

    def make(self) -> Eviction:
        return POLICIES[self.POLICY]().eviction


def kit(policy: str) -> type[Named]:
    return type(f"Test{policy.title().replace('_', '')}", (Named,), {"POLICY": policy})


TestDefault, TestLru, TestLfu, TestArc = (kit(policy) for policy in ("default", "lru", "lfu", "arc"))
TestS3Fifo, TestSieve, TestLru2, TestGdsf = (kit(policy) for policy in ("s3fifo", "sieve", "lru2", "gdsf"))
