"""The levels below the arena, and which of them a block is read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepwell.block.namespace import BlockId
from stepwell.block.tier import Figures
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.core import Core
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.turns import Place, RequestTurn, Turns
from stepwell.tiers.base import Tier


class BlockSource(NamedTuple):
    """Where a block can be read, and the id that it has there."""

    level: Level
    id: BlockId


class Stack:
    """`tiers`: the uppermost first, each with a name of its own."""

    def __init__(self, core: Core, arena: Arena, tiers: Sequence[Tier], sealing: Sealing) -> None:
        self._clock = core.clock
        self._index = core.index
        self.turns = Turns()
        levels: list[Level] = []
        lower: Level | None = None
        for number in reversed(range(len(tiers))):
            lower = Level(core, arena, tiers[number], sealing, number, self.turns, lower)
            levels.insert(0, lower)
        self.levels = tuple(levels)
        if len({level.name for level in levels}) < len(levels):
            raise ValueError(f"two tiers have the same name: {[level.name for level in levels]}")

    @property
    def keeps(self) -> bool:
        """There is a tier below that keeps blocks."""
        return any(level.keeps for level in self.levels)

    def takes(self, nbytes: int) -> bool:
        """A tier below would soon have written a block of so many bytes that passes through host memory."""
        return any(level.takes(nbytes) for level in self.levels)

    @property
    def shared(self) -> bool:
        """True if others write to one of the tiers too."""
        return any(level.shared and level.keeps for level in self.levels)

    def find(self, *ids: BlockId) -> BlockSource | None:
        """Where the block with one of these ids is to be read: the uppermost level that has it and is not down, else
        the uppermost that has it. None: no level has it."""
        down: BlockSource | None = None
        for level in self.levels:
            for id in ids:
                if level.tier.lookup(id):
                    if not level.down:
                        return BlockSource(level, id)
                    down = down or BlockSource(level, id)
        return down

    def promoting(self, entry: Entry) -> Level | None:
        """The level that this block is being promoted from; None: it is not."""
        level = self.levels[entry.source] if entry.source >= 0 else None
        return level if level is not None and entry in level.reads.promoting else None

    def disown(self, entry: Entry) -> bool:
        """If this entry is to come from a tier that is down, it is found no more: the block may be promoted from
        another tier, or filled anew. Its slots stay with the read."""
        level = self.promoting(entry)
        stuck = level is not None and level.down
        if stuck:
            self._index.remove(entry)
        return stuck

    def hasten(self, entry: Entry, turn: RequestTurn) -> None:
        """Another request wants a block that is being promoted, perhaps earlier than the one before."""
        if (level := self.promoting(entry)) is not None:
            level.reads.hasten(entry, turn)

    def unwanted(self, entry: Entry) -> None:
        """No request waits for this block any more: if it is being promoted and its read has not begun, its slots are
        free at once."""
        if (level := self.promoting(entry)) is not None:
            level.reads.unwanted(entry)

    def drop(self, id: BlockId) -> None:
        """Forgets a block: no level has it any more."""
        for level in self.levels:
            level.tier.drop(id)

    def ahead(self, place: Place) -> dict[str, int]:
        """Bytes that are being promoted for requests before this place in line, by tier."""
        return {level.name: level.reads.ahead(place) for level in self.levels}

    @property
    def speeds(self) -> dict[str, TierSpeed]:
        """How fast tiers are read, of those of which it is known."""
        return {level.name: speed for level in self.levels if (speed := level.speed) is not None}

    def allowance_s(self, stake_s: float) -> float:
        """The most that a request with so much at stake may wait for a block of any level in addition, in seconds."""
        return max((level.allowance_s(stake_s) for level in self.levels), default=0.0)

    @property
    def at_leisure(self) -> bool:
        """True if all tiers are healthy and no request waits for one."""
        return all(level.at_leisure for level in self.levels)

    def count(self) -> dict[str, Figures]:
        """Figures for `stats` of each tier."""
        return {level.name: level.count() for level in self.levels}

    # time -------------------------------------------------------------------------------------------------------------

    @property
    def next_moment(self) -> float | None:
        """When `pump_due` has something to do."""
        return min((moment for level in self.levels if (moment := level.next_moment) is not None), default=None)

    def pump(self) -> None:
        """Begins as many reads and writes as each tier should have."""
        for level in self.levels:
            level.pump()

    def pump_due(self) -> None:
        """Reads and writes whose time has come begin."""
        for level in self.levels:
            if (due := level.next_moment) is not None and due <= self._clock.now():
                level.pump()

    # a life's beginning and end ---------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finds what an earlier life left in the tiers, in the background. Call once, at first."""
        for level in self.levels:
            level.recover()

    def close(self) -> None:
        """Frees what the process holds for the tiers. No job may be running any more."""
        for level in self.levels:
            level.tier.close()
