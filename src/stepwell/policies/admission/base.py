"""The interface of admission policies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from stepwell.policies.item import Item


class Admission(ABC):
    """Asked after the use has been counted in the item."""

    @abstractmethod
    def admits(self, item: Item, victim: Item | None) -> bool:
        """May it take the place of `victim`, or a free one if that is None? What is not let in is not held, nor what is
        behind it."""
