"""Whatever comes stays in host memory until something else needs its place, whatever admission says: what inclusive
tiers with LRU do."""

from __future__ import annotations

from stepwell.policies.placement.base import Place, Placement


class Hot(Placement):
    def place(self, *, admitted: bool, below: bool) -> Place:
        return Place.HOT
