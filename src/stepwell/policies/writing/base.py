"""The interface of write policies."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WritePolicy(ABC):
    """Asked about blocks of host memory that the tier below does not have."""

    @abstractmethod
    def at_spill(self, uses: int) -> bool:
        """It has just been spilled: write it? `uses`: how often it was asked for, as far as is remembered; 1 after the
        first time."""

    @abstractmethod
    def at_use(self) -> bool:
        """It is in host memory and was asked for once more: write it?"""

    @abstractmethod
    def ahead(self, host_bytes: int) -> int:
        """What would leave host memory next is to be written by then, so many bytes ahead of the need; and all that is
        left when the well ends. 0: what leaves unwritten was not to be written."""
