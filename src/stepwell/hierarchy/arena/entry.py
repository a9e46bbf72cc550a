"""What the arena keeps for one block: where its shards lie, and who uses it."""

from __future__ import annotations

import struct

from stepwell.block.namespace import BlockId
from stepwell.block.state import Event, State, after
from stepwell.hierarchy.arena.slab import Slab
from stepwell.hierarchy.arena.standing import Standing
from stepwell.hierarchy.origin import Origin

_REF = struct.Struct("<IIQ")


class Entry:
    """A block with slots. Only the arena changes it.

    pins are soft holds of waiting requests, leases hard ones of copies under way. `children` counts blocks of the
    arena whose parent this is: while there are any, this one is not evicted, so tails leave before heads. `refs` are
    its SLOT_REF rows as messages carry them (slots and generations do not change during an entry's life). `origin` is
    set by the hierarchy: whose it is, for tiers below. `source` is the level that it was promoted from, -1 for one that
    an engine has filled; bit n of `written` says that level n has stored it. `standing` is set when it is given its
    place, and stays when it has left.
    """

    __slots__ = ("children", "id", "leases", "nbytes", "origin", "parent", "pins", "refs", "slots", "source",
                 "standing", "state", "written")  # fmt: skip

    standing: Standing

    def __init__(self, id: BlockId, slots: tuple[tuple[Slab, int], ...], parent: Entry | None) -> None:
        self.id = id
        self.origin: Origin | None = None
        self.slots = slots
        self.refs = b"".join(_REF.pack(slab.number, slot, slab.generation(slot)) for slab, slot in slots)
        self.nbytes = sum(slab.owner.slot_bytes for slab, _ in slots)
        self.state = after(State.ABSENT, Event.FILL)
        self.parent = parent
        self.children = 0
        self.pins = 0
        self.leases = 0
        self.source = -1
        self.written = 0

    def change(self, event: Event) -> None:
        self.state = after(self.state, event)

    @property
    def evictable(self) -> bool:
        return self.state is State.RESIDENT and not (self.pins or self.leases or self.children)
