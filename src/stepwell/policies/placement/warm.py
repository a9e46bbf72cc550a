"""Host memory is only the way to the tier below: for a host with little of it and a fast disk."""

from __future__ import annotations

from stepwell.policies.placement.base import Place, Placement


class Warm(Placement):
    def place(self, *, admitted: bool, below: bool) -> Place:
        if below:
            return Place.WARM
        return Place.HOT if admitted else Place.COLD
