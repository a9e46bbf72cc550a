"""Writes blocks shortly before they leave host memory: none while there is room, and all when the well ends; a kill
loses the unwritten ones. (Write-back: A. J. Smith, "Cache Memories", ACM Computing Surveys 14(3), 1982.) An eviction
cannot wait for a write, so the next victims are written ahead, as an operating system cleans pages before it needs
them."""

from __future__ import annotations

from typing import Final

from stepwell.policies.writing.base import WritePolicy

SHARE: Final = 8
"""One part in so many of host memory, at most, is kept clean or free: what may be spilled until a write has ended."""


class Back(WritePolicy):
    def at_spill(self, uses: int) -> bool:
        return False

    def at_use(self) -> bool:
        return False

    def ahead(self, host_bytes: int) -> int:
        return host_bytes // SHARE
