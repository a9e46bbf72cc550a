"""Writes blocks that are asked for a second time: a prompt that never recurs wears no device. The third request may
find it there. (The idea of 2Q's first queue: Johnson, Shasha, "2Q: a low overhead high performance buffer management
replacement algorithm", VLDB 1994; for flash: Tang et al., "RIPQ: advanced photo caching on flash for Facebook", FAST
2015, and others since.)"""

from __future__ import annotations

from stepwell.policies.writing.base import WritePolicy


class SecondTouchWriting(WritePolicy):
    def at_spill(self, uses: int) -> bool:
        return uses > 1

    def at_use(self) -> bool:
        return True

    def ahead(self, host_bytes: int) -> int:
        return 0
