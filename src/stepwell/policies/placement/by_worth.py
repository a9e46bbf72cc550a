"""The default: host memory holds the blocks of the highest value, the tier below the rest."""

from __future__ import annotations

from stepwell.policies.placement.base import Destination, Placement


class ByWorth(Placement):
    def place(self, *, admitted: bool, below: bool) -> Destination:
        if admitted:
            return Destination.HOT
        return Destination.WARM if below else Destination.COLD
