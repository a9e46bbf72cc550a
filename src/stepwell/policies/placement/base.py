"""The interface of placement policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum


class Destination(Enum):
    """HOT: host memory keeps it for as long as it is worth more than others. WARM: it passes through host memory, is
    the first to leave it, and the tier below keeps it. COLD: it is not taken at all."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


class Placement(ABC):
    """Placement of each block that enters host memory, spilled by an engine or promoted from below."""

    @abstractmethod
    def place(self, *, admitted: bool, below: bool) -> Destination:
        """`admitted`: the admission policy finds it worth as much as what it would displace. `below`: there is a tier
        that keeps it or takes it."""
