"""Lets in items that are asked for a second time, as far as remembered (as with 2Q's first queue: Johnson, Shasha, "2Q:
a low overhead high performance buffer management replacement algorithm", VLDB 1994)."""

from __future__ import annotations

from stepwell.policies.admission.base import Admission
from stepwell.policies.item import Item


class SecondTouchAdmission(Admission):
    def admits(self, item: Item, victim: Item | None) -> bool:
        return item.uses > 1
