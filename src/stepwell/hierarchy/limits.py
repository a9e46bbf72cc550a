"""The bounds a hierarchy is given."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.block.layout import LEAST_SLAB


@dataclass(frozen=True, slots=True)
class Limits:
    """host_bytes: the arena's size. pin_waiting: share of it that waiting requests may pin together. queue_bytes: of
    blocks that wait to be written to a tier. readers: batches that are read from a tier at the same time.
    slab_bytes: the least of a slab, if eight slots need no more."""

    host_bytes: int
    pin_waiting: float = 0.5
    queue_bytes: int = 256 << 20
    readers: int = 4
    slab_bytes: int = LEAST_SLAB
