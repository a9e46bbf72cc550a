"""Counters of the well, and the memory of what was evicted lately (to tell 'evicted' from 'never seen')."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import assert_never

from stepwell import events as e
from stepwell.block.namespace import BlockId

_REMEMBERED = 1 << 16


class Ghosts:
    """The ids of the last 65,536 blocks that were evicted, 8 bytes each. Wrong in about one of 10^14 look-ups."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, None] = OrderedDict()

    def add(self, id: BlockId) -> None:
        self._ids[id[:8]] = None
        if len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)

    def __contains__(self, id: BlockId) -> bool:
        return id[:8] in self._ids


class Counters:
    """Counts events, from the well's start. Reasons are the metric labels of misses and of refused spills."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.refused_spills: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.engine: Counter[str] = Counter()

    def __call__(self, event: e.Event) -> None:
        match event:
            case e.RunAnswered(hits, missed, reason):
                self.total["requests"] += 1
                self.total["hits"] += hits
                if missed:
                    self.misses[reason] += missed
            case e.BlocksRecalled(blocks, nbytes):
                self.total["recalled_blocks"] += blocks
                self.total["recalled_bytes"] += nbytes
            case e.BlockSpilled(nbytes):
                self.total["spilled_blocks"] += 1
                self.total["spilled_bytes"] += nbytes
            case e.SpillRefused(reason):
                self.refused_spills[reason] += 1
            case e.BlockDropped(reason):
                self.drops[reason] += 1
            case e.SessionOpened():
                self.total["sessions_opened"] += 1
            case e.SessionEnded():
                self.total["sessions_ended"] += 1
            case e.SlabServing():
                self.total["slabs_made"] += 1
            case e.SlabRetired():
                self.total["slabs_retired"] += 1
            case e.ArenaTroubled():
                self.total["troubles"] += 1
            case e.EngineReported(counts):
                self._reported(counts)
            case never:
                assert_never(never)

    def _reported(self, counts: dict[str, int]) -> None:
        """Names come from outside: at most 64 of 48 characters are kept."""
        for name, n in counts.items():
            name = name[:48]
            if name in self.engine or len(self.engine) < 64:
                self.engine[name] += max(n, 0)

    def values(self) -> dict[str, int]:
        """One flat table; the sums that people look for are there from the start."""
        table = dict.fromkeys(
            ("requests", "hits", "recalled_blocks", "recalled_bytes", "spilled_blocks", "spilled_bytes"), 0
        )
        table.update(self.total)
        for prefix, counter in (
            ("misses", self.misses),
            ("spills_refused", self.refused_spills),
            ("dropped", self.drops),
            ("engine", self.engine),
        ):
            table.update({f"{prefix}_{name}": n for name, n in counter.items()})
        return table
