"""Long work in slices: a generator that yields after each block, so that others get their turn."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Step(Enum):
    DONE = "done"  # one block's worth of work
    PARK = "park"  # go on when a slab has come


Work = Iterator[Step]
