"""Writes blocks as soon as they are spilled: a kill loses only those on their way, and every block wears the device
once. (Write-through: A. J. Smith, "Cache Memories", ACM Computing Surveys 14(3), 1982.)"""

from __future__ import annotations

from stepwell.policies.writing.base import WritePolicy


class Through(WritePolicy):
    def at_spill(self, uses: int) -> bool:
        return True

    def at_use(self) -> bool:
        return False  # it was written when it was spilled, or could not be

    def ahead(self, host_bytes: int) -> int:
        return 0
