"""Every block stays in host memory until its place is needed, whatever admission decides, as in inclusive tiers with
LRU."""

from __future__ import annotations

from stepwell.policies.placement.base import Destination, Placement


class Hot(Placement):
    def place(self, *, admitted: bool, below: bool) -> Destination:
        return Destination.HOT
