"""A slab: one piece of shared memory, cut into slots of one size, serving one owner until it is retired."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from stepwell.block.layout import SlabLayout
from stepwell.io.memory import PIECE, Bytes, SharedMemory

if TYPE_CHECKING:
    from stepwell.hierarchy.arena.entry import Entry


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose blocks a slab may hold: one tenant, one model and layout, one slot size. Epochs share an owner."""

    tenant: str
    model: bytes
    slot_bytes: int


class Phase(Enum):
    POPULATING = "populating"  # memory is being touched; nobody else knows the slab
    SERVING = "serving"
    RETIRED = "retired"  # emptied; its memory is being given back, by the system and by its keepers


@dataclass(slots=True)
class Retirement:
    """`since` when, and who gets a slab of its own when this one's bytes are free. `punched`: the system has the pages
    back, as far as the well goes. `told`: that its bytes do not come back was said."""

    since: float
    heir: Owner | None
    punched: bool = False
    told: bool = False


class Slab:
    """Slots are free, held by an entry (`held`), or quarantined; `audit` adds them up.

    `mapped` are the members that have it mapped and prefaulted; `keepers` those that may keep its pages in memory, from
    when it is shared with them until they say that they do not, or their process ends. Generations only grow and are
    never 0 for a slot that was ever leased, so that a punched (zeroed) word never matches a reference. `unused_since`:
    it serves, and no slot was ever leased.
    """

    __slots__ = ("free", "held", "keepers", "layout", "mapped", "memory", "number", "owner", "phase", "populated",
                 "quarantined", "retirement", "unused_since")  # fmt: skip

    def __init__(self, number: int, owner: Owner, layout: SlabLayout, memory: SharedMemory) -> None:
        self.number = number
        self.owner = owner
        self.layout = layout
        self.memory = memory
        self.phase = Phase.POPULATING
        self.populated = 0
        self.free = list(range(layout.slots - 1, -1, -1))
        self.held: dict[int, Entry] = {}
        self.quarantined: set[int] = set()
        self.mapped: set[int] = set()
        self.keepers: set[int] = set()
        self.retirement: Retirement | None = None
        self.unused_since: float | None = None

    def next_piece(self) -> tuple[int, int]:
        """Start and length of what is to be populated next; length 0 when all is."""
        return self.populated, min(PIECE, self.layout.nbytes - self.populated)

    def payload(self, slot: int) -> Bytes:
        """The slot's bytes."""
        start = self.layout.offset + slot * self.layout.stride
        return self.memory.bytes[start : start + self.layout.slot_bytes]

    def _generations(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self.memory.bytes[: 8 * self.layout.slots].view(np.uint64)

    def generation(self, slot: int) -> int:
        return int(self._generations()[slot])

    def renew(self, slot: int) -> None:
        """A new generation: whoever still reads the slot's last content finds out after its copy."""
        self._generations()[slot] += np.uint64(1)
        self.unused_since = None

    def forget_generations(self) -> None:
        """No reference of the past holds any more."""
        self._generations()[:] = 0
