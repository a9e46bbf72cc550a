"""The default: host memory is for what is worth its place, the tier below for the rest."""

from __future__ import annotations

from stepwell.policies.placement.base import Place, Placement


class ByWorth(Placement):
    def place(self, *, admitted: bool, below: bool) -> Place:
        if admitted:
            return Place.HOT
        return Place.WARM if below else Place.COLD
