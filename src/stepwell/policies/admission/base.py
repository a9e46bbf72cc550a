"""The interface of admission policies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from stepwell.policies.item import Item


class Admission(ABC):
    """Asked after the use has been counted in the item."""

    @abstractmethod
    def admits(self, item: Item, victim: Item | None) -> bool:
        """True if the item may take the place of `victim`, or a free one if that is None. An item that is refused is
        not held, and neither are the items behind it."""
