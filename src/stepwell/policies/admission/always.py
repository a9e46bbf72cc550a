"""Lets everything in, as a write-through tier does."""

from __future__ import annotations

from stepwell.policies.admission.base import Admission
from stepwell.policies.item import Item


class Always(Admission):
    def admits(self, item: Item, victim: Item | None) -> bool:
        return True
