"""Blocks only pass through host memory to the tier below: for a host with little memory and a fast disk."""

from __future__ import annotations

from stepwell.policies.placement.base import Destination, Placement


class Warm(Placement):
    def place(self, *, admitted: bool, below: bool) -> Destination:
        if below:
            return Destination.WARM
        return Destination.HOT if admitted else Destination.COLD
