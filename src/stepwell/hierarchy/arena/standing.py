"""What is remembered of one block's use, while the arena holds it and for a while after: what policies judge it by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.block.namespace import BlockId

if TYPE_CHECKING:
    from stepwell.hierarchy.arena.entry import Entry


class Standing:
    """An `Item` of policies. `entry`: the block, while it is held. `depth`: blocks before it in the prompt, as far as
    that is known. `seconds`: what computing it takes, in units of what a prompt's first block takes: only ratios
    between blocks of one owner matter, and these are known before any time was measured. `passing`: it is to leave
    before all that policies rank."""

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
