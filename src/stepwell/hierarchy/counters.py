"""Counters of the well, and the memory of what was evicted lately (to tell 'evicted' from 'never seen')."""

from __future__ import annotations

from collections import Counter, OrderedDict

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
    """Monotonic since the well started. Reasons are the metric labels of misses and of refused spills."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.refused_spills: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.engine: Counter[str] = Counter()

    def values(self) -> dict[str, int]:
        table = dict(self.total)
        for prefix, counter in (
            ("misses", self.misses),
            ("spills_refused", self.refused_spills),
            ("dropped", self.drops),
            ("engine", self.engine),
        ):
            table.update({f"{prefix}_{name}": n for name, n in counter.items()})
        return table
