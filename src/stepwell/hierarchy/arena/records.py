"""Records of the arena: slabs, the entries of blocks in their slots, and histories of blocks. Each of these three
refers to the others."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from stepwell.block.layout import SlabLayout
from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState, StateEvent, after
from stepwell.hierarchy.arena.origin import Origin
from stepwell.io.memory import PIECE, Bytes, SharedMemory

_REF = struct.Struct("<IIQ")


class Owner(NamedTuple):
    """The owner of the blocks in a slab: one tenant, one model and layout, one slot size. Epochs share an owner."""

    tenant: str
    model: bytes
    slot_bytes: int


class SlabPhase(Enum):
    POPULATING = "populating"  # memory is being touched; only the arena knows the slab
    SERVING = "serving"
    RETIRED = "retired"  # emptied; its memory is being given back, by the system and by its keepers


@dataclass(slots=True)
class Retirement:
    """`since`: when it began. `heir`: gets a slab of its own when this one's bytes are free. `punched`: the well has
    given the pages back to the system. `told`: it was reported that the bytes do not come back."""

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

    __slots__ = ("_generations", "free", "held", "keepers", "layout", "mapped", "memory", "number", "owner", "phase",
                 "populated", "quarantined", "retirement", "unused_since")  # fmt: skip

    def __init__(self, number: int, owner: Owner, layout: SlabLayout, memory: SharedMemory) -> None:
        self.number = number
        self.owner = owner
        self.layout = layout
        self.memory = memory
        self.phase = SlabPhase.POPULATING
        self.populated = 0
        self.free = list(range(layout.slots - 1, -1, -1))
        self.held: dict[int, Entry] = {}
        self.quarantined: set[int] = set()
        self.mapped: set[int] = set()
        self.keepers: set[int] = set()
        self.retirement: Retirement | None = None
        self.unused_since: float | None = None
        self._generations = memory.bytes[: 8 * layout.slots].data.cast("Q")

    def next_piece(self) -> tuple[int, int]:
        """Start and length of the next piece to populate; length 0 when there is none."""
        return self.populated, min(PIECE, self.layout.nbytes - self.populated)

    def payload(self, slot: int) -> Bytes:
        """The slot's bytes."""
        start = self.layout.offset + slot * self.layout.stride
        return self.memory.bytes[start : start + self.layout.slot_bytes]

    def close(self) -> None:
        """Unmaps its memory."""
        self._generations.release()
        self.memory.close()

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def renew(self, slot: int) -> None:
        """Begins a new generation: a process that still reads the slot's last content finds out after its copy. Members
        may write to this memory: whatever stands there has a next one."""
        self._generations[slot] = (self._generations[slot] + 1) % (1 << 64)
        self.unused_since = None

    def forget_generations(self) -> None:
        """Makes every reference of the past invalid."""
        self.memory.bytes[: 8 * self.layout.slots] = 0


class Entry:
    """A block with slots. Only the arena changes it.

    pins are soft holds of waiting requests, leases hard ones of copies under way. `children` counts blocks of the
    arena whose parent this is: while there are any, this one is not evicted, so tails leave before heads. `refs` are
    its SLOT_REF rows as messages carry them (slots and generations do not change during an entry's life). `origin` is
    set by the hierarchy: whose it is, for tiers below. `source` is the level that it was promoted from, -1 for one that
    an engine has filled; bit n of `written` says that level n has stored it. `history` is set when it is given its
    place, and stays when it has left. `position`: blocks before it in its prefix; -1 where that is not known.
    """

    __slots__ = ("children", "history", "id", "leases", "nbytes", "origin", "parent", "pins", "position", "refs",
                 "slots", "source", "state", "written")  # fmt: skip

    history: BlockHistory
    position: int

    def __init__(self, id: BlockId, slots: tuple[tuple[Slab, int], ...], parent: Entry | None) -> None:
        self.id = id
        self.origin: Origin | None = None
        self.slots = slots
        self.refs = b"".join([_REF.pack(slab.number, slot, slab.generation(slot)) for slab, slot in slots])
        self.nbytes = sum([slab.owner.slot_bytes for slab, _ in slots])
        self.state = after(BlockState.ABSENT, StateEvent.FILL)
        self.parent = parent
        self.position = parent.position + 1 if parent is not None and parent.position >= 0 else -1
        self.children = 0
        self.pins = 0
        self.leases = 0
        self.source = -1
        self.written = 0

    def change(self, event: StateEvent) -> None:
        self.state = after(self.state, event)

    @property
    def evictable(self) -> bool:
        return self.state is BlockState.RESIDENT and not (self.pins or self.leases or self.children)


class BlockHistory:
    """A block's past use as policies judge it (an `Item`), while the arena holds it and for a while after. `entry`: the
    block, while it is held. `depth`: known blocks before it in the prompt. `seconds`: what computing it takes, in units
    of what a prompt's first block takes: only ratios between blocks of one owner matter, and these are known before any
    time was measured. `passing`: it is to leave before all that policies rank."""

    __slots__ = ("depth", "entry", "id", "listed", "note", "passing", "seconds", "used", "uses")

    size = 1

    def __init__(self, id: BlockId, depth: int, seconds: float) -> None:
        self.id = id
        self.depth = depth
        self.seconds = seconds
        self.entry: Entry | None = None
        self.passing = False
        self.uses = 0
        self.used = 0.0
        self.note: Any = None
        self.listed = 0

    @property
    def evictable(self) -> bool:
        return self.entry is not None and self.entry.evictable
