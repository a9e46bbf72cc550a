"""Which blocks of one owner the arena holds on to, by one policy of eviction and one of admission.

    used ──► how often and when, held or not ──► admits? ──► enter ──► offer: may go ──► next ──► leave ──► remembered

Tails leave before heads: a block with children in the arena is not evictable, and is offered when its last child has
left. What passes through leaves before all others, in the order in which it came to be free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final

from stepwell.block.namespace import BlockId
from stepwell.hierarchy.arena.records import Entry, Standing
from stepwell.policies.catalog import TierPolicy
from stepwell.policies.past import Past, PastTally, most_remembered

MAX_REMEMBERED: Final = 1 << 22
"""Blocks of one owner that have left and are remembered, some 300 bytes each, however large `host` is."""


class Residents:
    """`capacity`: blocks that the owner might hold at most. `tally` counts what all owners remember."""

    def __init__(self, policy: TierPolicy, capacity: int, tally: PastTally | None = None) -> None:
        self._eviction, self._admission = policy.eviction, policy.admission
        self._standings: dict[BlockId, Standing] = {}
        most = min(most_remembered(capacity), MAX_REMEMBERED)
        self._past = Past[Standing](most, self._forget, tally)
        self._passing: OrderedDict[Entry, None] = OrderedDict()  # held, and evictable when they came

    @property
    def remembered(self) -> int:
        """Blocks that have left."""
        return self._past.blocks

    def forget(self, blocks: int) -> None:
        """So many of those that have left, the earliest."""
        self._past.forget(blocks)

    def known(self, id: BlockId) -> Standing | None:
        """Of a block that is held or remembered."""
        return self._standings.get(id)

    def asked(self, id: BlockId, depth: int, seconds: float, now: float) -> None:
        """A request needs a block that is not held: it counts as a use, and is remembered. What was known of its place
        before may have been a guess."""
        standing = self._standings.get(id)
        if standing is None:
            standing = self._standings[id] = Standing(id, depth, seconds)
        if standing.entry is None:
            standing.depth, standing.seconds = depth, seconds
        self._use(standing, now)
        if standing.entry is None:
            self._past.remember(standing)

    def used(self, run: Iterable[Entry], now: float) -> None:
        """A request uses these, which are held: tail to head."""
        for entry in run:
            if entry.standing.entry is entry:
                self._use(entry.standing, now)

    def _use(self, standing: Standing, now: float) -> None:
        self._eviction.refer(standing, now)
        standing.uses += 1
        standing.used = now

    def admits(self, standing: Standing, victim: Entry | None) -> bool:
        """Whether it is worth the place of `victim`, or a free one. What passes through has no worth to compare."""
        displaced = victim.standing if victim is not None and not victim.standing.passing else None
        return self._admission.admits(standing, displaced)

    def enter(self, entry: Entry, now: float, *, passing: bool) -> None:
        """It is held from now on. What was never asked for is so now."""
        standing = self._standings.get(entry.id)
        if standing is None or standing.entry is not None:  # there, but stuck in a read that nobody waits for any more
            standing = self._standings[entry.id] = Standing(entry.id, 0, 1.0)
            self._use(standing, now)
        entry.standing = standing
        standing.entry, standing.passing = entry, passing
        self._past.came(standing)
        if not passing:
            self._eviction.enter(standing)

    def may_stay(self, entry: Entry) -> bool:
        """It passes through, and is worth as much as what the policy would let go for it."""
        standing = entry.standing
        passing = standing.passing and standing.entry is entry
        return passing and self._admission.admits(standing, self._eviction.victim())

    def stay(self, entry: Entry) -> None:
        """It passes through no more."""
        self._passing.pop(entry, None)
        entry.standing.passing = False
        self._eviction.enter(entry.standing)
        self.offer(entry)

    def leave(self, entry: Entry) -> None:
        """It is held no more; its use stays known for a while."""
        standing = entry.standing
        if standing.passing:
            self._passing.pop(entry, None)
        else:
            self._eviction.leave(standing)
        standing.entry, standing.passing = None, False
        self._past.remember(standing)

    def offer(self, entry: Entry) -> None:
        """Call whenever a block may have become evictable."""
        standing = entry.standing
        if standing.entry is not entry:
            return  # it has left, and somebody still copies it
        if not standing.passing:
            self._eviction.offer(standing)
        elif entry.evictable:
            self._passing[entry] = None

    def next(self) -> Entry | None:
        """The next to go, or None. Leaves it in place."""
        while self._passing:
            entry = next(iter(self._passing))
            if entry.evictable:
                return entry
            self._passing.popitem(last=False)
        victim = self._eviction.victim()
        return victim.entry if isinstance(victim, Standing) else None

    def few(self, n: int) -> list[Entry]:
        """At most `n` of those that will go soon, the next among them: not all of them in their order."""
        found = [entry for entry in islice(self._passing, n) if entry.evictable]
        for item in islice(self._eviction.few(n), n - len(found)):
            if isinstance(item, Standing) and item.entry is not None and item.evictable:
                found.append(item.entry)
        return found

    def wrong(self) -> str:
        """What does not add up; for tests."""
        held = any(standing.entry is not None for standing in self._past)
        gone = (standing for standing in self._standings.values() if standing.entry is None)
        return "something is held and remembered as well" if held else self._past.wrong(gone)

    def _forget(self, standing: Standing) -> None:
        self._eviction.forget(standing)
        standing.uses = 0
        if self._standings.get(standing.id) is standing:
            del self._standings[standing.id]
