"""The interface of write policies."""

from __future__ import annotations

from abc import ABC, abstractmethod


class WritePolicy(ABC):
    """Asked about blocks of host memory that the tier below does not have."""

    @abstractmethod
    def at_spill(self, uses: int) -> bool:
        """True to write a block that has just been spilled. `uses`: number of requests for it, as far as remembered;
        1 after the first."""

    @abstractmethod
    def at_use(self) -> bool:
        """True to write a block in host memory that was asked for once more."""

    @abstractmethod
    def ahead(self, host_bytes: int) -> int:
        """Bytes of next victims that are kept written ahead of the need; the rest is written when the well ends. 0:
        blocks leave host memory unwritten."""
