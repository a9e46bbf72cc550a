"""The default: host memory holds the blocks of the highest value, the tier below the rest."""

from __future__ import annotations

from stepwell.policies.placement.base import Place, Placement


class ByWorth(Placement):
    def place(self, *, admitted: bool, below: bool) -> Place:
        if admitted:
            return Place.HOT
        return Place.WARM if below else Place.COLD
