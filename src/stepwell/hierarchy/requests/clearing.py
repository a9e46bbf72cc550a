"""Walks through all that is cached: counting namespaces, and dropping blocks.

Both walk the whole arena, slot by slot in slices, so that no engine waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from stepwell.block.state import BlockState
from stepwell.block.tier import HOST
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.levels.level import Level
from stepwell.hierarchy.levels.stack import Stack
from stepwell.hierarchy.saved import Tags
from stepwell.hierarchy.sessions.known import Difference, KnownFacts
from stepwell.hierarchy.sessions.session import Session
from stepwell.hierarchy.work import WALK_BLOCKS, Work, WorkQueue, WorkStep
from stepwell.protocol.messages import CacheGroup
from stepwell.tiers.base import Forgotten


@dataclass(slots=True)
class Sum:
    """`whole`: that is all that there was; else a tier's storage has failed, or holds a file that may be ours and
    cannot be read, and some may come back."""

    blocks: int = 0
    nbytes: int = 0
    whole: bool = True

    def add(self, nbytes: int) -> None:
        self.blocks += 1
        self.nbytes += nbytes


@dataclass(slots=True)
class NamespaceSum(Sum):
    """`engines`: labels of live sessions. `quarantined`: nothing of it is recalled or spilled. `nearest`: tag of the
    namespace that it `differs` least from, of those of its tenant that hold more blocks. `groups` of its engines' model
    are each in so many `shards` of a block."""

    tenant: str = ""
    quarantined: bool = False
    engines: set[str] = field(default_factory=set)
    nearest: bytes = b""
    differs: list[Difference] = field(default_factory=list)
    groups: list[CacheGroup] = field(default_factory=list)
    shards: int = 1


Cleared = Callable[[dict[str, Sum]], None]
Counted = Callable[[dict[bytes, NamespaceSum]], None]


@dataclass(eq=False)
class Clearing:
    """Drops resident blocks of `tiers`: all, or those of one `namespace`. Those that are being copied or are pinned are
    dropped too: they are found no more, and their slots are free when the last copy has ended. What engines are
    filling is not: it comes after this. `done` gets what went, by tier.

    Host goes first, so that nothing of it is written behind the back of a tier that was just cleared. Then all levels
    are cleared beside each other, so that one that hangs keeps no other from it. When they are clear, what was promoted
    from them meanwhile goes, and the levels above the last are cleared once more: it may have been written there.
    """

    _arena: Arena
    _stack: Stack
    _tiers: frozenset[str]
    _namespace: bytes
    _work: WorkQueue
    _done: Cleared
    _sums: dict[str, Sum] = field(default_factory=dict)
    _forgotten: dict[str, Forgotten] = field(default_factory=dict)  # by tier, of all its clears

    def run(self) -> Work:
        if HOST in self._tiers:
            yield from self._drop()
        self._clear([level for level in self._stack.levels if level.name in self._tiers], once_more=True)

    def _clear(self, levels: list[Level], *, once_more: bool) -> None:
        left = {level.name for level in levels}
        if not left:
            self._done(self._sums)
            return

        def gone(level: Level, forgotten: Forgotten) -> None:
            total = self._forgotten[level.name] = self._forgotten.get(level.name, Forgotten()) + forgotten
            self._sums[level.name] = Sum(total.blocks, total.nbytes, total.whole)
            left.discard(level.name)
            if not left:
                self._work.walk(self._finish(levels, once_more=once_more))

        for level in levels:
            level.tier.clear(partial(gone, level), self._namespace)

    def _finish(self, levels: list[Level], *, once_more: bool) -> Work:
        """The tiers read none of these blocks any more: what they read of them before is there, and goes."""
        if HOST in self._tiers:
            yield from self._drop(frozenset(level.number for level in levels))
        self._clear(levels[:-1] if once_more else [], once_more=False)

    def _drop(self, sources: frozenset[int] | None = None) -> Work:
        """All, or only what was promoted from these levels."""
        total = self._sums.setdefault(HOST, Sum())
        for entry in self._arena.walk():
            ours = not self._namespace or (entry.origin is not None and entry.origin.tag == self._namespace)
            if ours and entry.state is BlockState.RESIDENT and (sources is None or entry.source in sources):
                total.add(entry.nbytes)
                self._arena.drop(entry, "cleared")
            yield WorkStep.DONE


def count(
    arena: Arena,
    sessions: Iterable[Session],
    barred: Iterable[Tags],
    known: KnownFacts,
    done: Counted,
) -> Work:
    """Blocks and bytes in `host` by namespace; those of live sessions and those in quarantine are named even if they
    hold nothing."""
    sums = {tags[0]: NamespaceSum(quarantined=True) for tags in barred}
    for session in sessions:
        label = session.scheduler.label if session.scheduler is not None else ""
        groups = session.scheduler.hello.groups if session.scheduler is not None else []
        for origins in session.keyed.known if session.keyed is not None else ():
            of = sums.setdefault(origins[0].tag, NamespaceSum())
            of.tenant = session.tenant
            of.engines.add(label)
            of.groups, of.shards = groups, session.shards
    for entry in arena.walk():
        if entry.origin is not None and entry.state is BlockState.RESIDENT:
            tenant = entry.slots[0][0].owner.tenant
            sums.setdefault(entry.origin.tag, NamespaceSum(tenant=tenant)).add(entry.nbytes)
        yield WorkStep.DONE
    for tag, of in sums.items():
        for other in known.others(of.tenant, tag) if of.engines else ():
            if other in sums and sums[other].blocks > of.blocks:
                differs = known.differences(of.tenant, tag, other)
                if differs and (not of.differs or len(differs) < len(of.differs)):
                    of.nearest, of.differs = other, differs
                yield from repeat(WorkStep.DONE, WALK_BLOCKS)  # it may have taken as long as a turn may
    done(sums)
