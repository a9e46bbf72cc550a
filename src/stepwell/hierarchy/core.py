"""Objects that all parts of the hierarchy share, handed to each of them when it is made.

The index says which blocks can be found in host memory. News is what parts leave for waiting requests: instead of
calling them back in the middle of something, a part notes what has happened, and the next turn looks at it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from stepwell.block.layout import MIN_SLAB
from stepwell.block.namespace import BlockId
from stepwell.block.state import BlockState
from stepwell.events import Sink
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.pauses import Pauses
from stepwell.hierarchy.work import WorkQueue
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.io.memory import Memory
from stepwell.policies.decide import RecallMode
from stepwell.policies.placement.base import Placement
from stepwell.policies.placement.by_worth import ByWorth
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.through import Through

Callback = Callable[[], None]
"""Called once, when what was asked for has happened."""

Entropy = Callable[[int], bytes]
"""A function that returns so many random bytes."""

Judge = Callable[[Mapping[str, str | int | float]], list[str]]
"""Checks the options of a joining engine: returns warnings, raises ConfigError for nonsense."""


@dataclass(frozen=True, slots=True)
class System:
    """Everything that blocks or cannot be repeated, injected: clock, jobs that block, shared memory, random bytes."""

    clock: Clock
    executor: Executor
    memory: Memory
    entropy: Entropy = secrets.token_bytes


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that an operator may change while the well serves. recall: the mode of requests that ask
    for none. placement: where blocks are to lie. write: when blocks are written to tiers. prefetch: blocks are promoted
    before a request asks for them. pin_waiting: share of host memory that waiting requests may pin together. judge:
    checks the options of engines that join."""

    recall: RecallMode = RecallMode.AUTO
    placement: Placement = field(default_factory=ByWorth)
    write: WritePolicy = field(default_factory=Through)
    prefetch: bool = False
    pin_waiting: float = 0.5
    judge: Judge = lambda options: []


@dataclass(frozen=True, slots=True)
class Limits:
    """host_bytes: the arena's size. queue_bytes: of blocks that wait to be written to a tier. readers: batches that are
    read from a tier at the same time. slab_bytes: the least of a slab, if eight slots need no more."""

    host_bytes: int
    queue_bytes: int = 256 << 20
    readers: int = 4
    slab_bytes: int = MIN_SLAB


class Index:
    """The blocks that can be found in host memory, by id: one entry each, FILLING or RESIDENT."""

    def __init__(self) -> None:
        self._entries: dict[BlockId, Entry] = {}
        self.entries: Mapping[BlockId, Entry] = MappingProxyType(self._entries)

    def find(self, *ids: BlockId) -> Entry | None:
        """The entry of the first of these ids that is here."""
        for id in ids:
            entry = self._entries.get(id)
            if entry is not None:
                return entry
        return None

    def run(self, names: Sequence[Sequence[BlockId]]) -> list[Entry]:
        """The entries of consecutive blocks, up to the first that cannot be read. `names`: all ids, under each key."""
        get = self._entries.get
        found = list(map(get, names[0]))
        for others in names[1:]:
            found = [entry or get(id) for entry, id in zip(found, others, strict=True)]
        run: list[Entry] = []
        for entry in found:
            if entry is None or entry.state is not BlockState.RESIDENT:
                break
            run.append(entry)
        return run

    def __contains__(self, id: BlockId) -> bool:
        return id in self._entries

    def add(self, entry: Entry) -> bool:
        """Adds the entry. False: another entry has its place, and keeps it."""
        return self._entries.setdefault(entry.id, entry) is entry

    def remove(self, entry: Entry) -> None:
        """Removes the entry, unless another one has its place."""
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id]


@dataclass(slots=True)
class News:
    """Events since the last look that requests may be waiting for.

    changed: anything that any of them may wait for. freed: copies or writes that held slots have ended. tier_down: the
    tier is read no more. probed: a tier has said what it has. landed: blocks whose read from a tier has ended, RESIDENT
    or gone."""

    changed: bool = False
    freed: bool = False
    tier_down: bool = False
    probed: bool = False
    landed: list[Entry] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return self.changed or self.freed or self.tier_down or self.probed or bool(self.landed)

    def take(self) -> News:
        """Returns the news and clears it."""
        taken = News(self.changed, self.freed, self.tier_down, self.probed, self.landed)
        self.changed = self.freed = self.tier_down = self.probed = False
        self.landed = []
        return taken


@dataclass(frozen=True, slots=True)
class Core:
    """`emit` takes every event. `work`: long work of engines, in slices. `pauses`: what the operator has switched
    off."""

    clock: Clock
    limits: Limits
    emit: Sink
    pauses: Pauses
    work: WorkQueue
    index: Index = field(default_factory=Index)
    news: News = field(default_factory=News)
