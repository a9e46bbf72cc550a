"""Blocks only pass through host memory to the tier below: for a host with little memory and a fast disk."""

from __future__ import annotations

from stepwell.policies.placement.base import Place, Placement


class Warm(Placement):
    def place(self, *, admitted: bool, below: bool) -> Place:
        if below:
            return Place.WARM
        return Place.HOT if admitted else Place.COLD
