"""Only what is expected to be worth more than what it would displace."""

from __future__ import annotations

from stepwell.policies.admission.base import Admission
from stepwell.policies.eviction.valued import Valued
from stepwell.policies.item import Item


class ExpectedValue(Admission):
    """By the values of the eviction that it stands before: so it is strict while a tier is small and its blocks are of
    use, and lets everything in when what would go is not expected to be used again."""

    def __init__(self, eviction: Valued) -> None:
        self._value = eviction.value

    def admits(self, item: Item, victim: Item | None) -> bool:
        return victim is None or self._value(item) >= self._value(victim)
