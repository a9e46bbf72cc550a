"""Greedy dual size frequency (Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Labs 1998), with recompute cost as value."""

from __future__ import annotations

from stepwell.policies.eviction.lfu import Lfu
from stepwell.policies.item import Item


class Gdsf(Lfu):
    """Like LFU with ageing, but a use counts as the prefill seconds that each block saves: later ones in a long prompt
    more than the first."""

    def worth(self, item: Item) -> float:
        return (item.uses + 1) * item.seconds / item.size
