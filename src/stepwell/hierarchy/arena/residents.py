"""Ranks the blocks of one owner, which the arena keeps by one policy of eviction and one of admission.

    used ──► how often and when, held or not ──► admits? ──► enter ──► offer: may go ──► next ──► leave ──► remembered

Tails leave before heads: a block with children in the arena is not evictable, and is offered when its last child has
left. What passes through leaves before all others, in the order in which it came to be free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from stepwell.block.namespace import BlockId
from stepwell.hierarchy.arena.records import BlockHistory, Entry
from stepwell.policies.catalog import TierPolicy
from stepwell.policies.past import Past, PastTally, most_remembered

MAX_REMEMBERED: Final = 1 << 22
"""Blocks of one owner that have left and are remembered, some 300 bytes each, however large `host` is."""


class Residents:
    """`capacity`: blocks that the owner might hold at most. `tally` counts what all owners remember."""

    def __init__(self, policy: TierPolicy, capacity: int, tally: PastTally | None = None) -> None:
        self._eviction, self._admission = policy.eviction, policy.admission
        self._histories: dict[BlockId, BlockHistory] = {}
        most = min(most_remembered(capacity), MAX_REMEMBERED)
        self._past = Past[BlockHistory](most, self._forget, tally)
        self._passing: OrderedDict[Entry, None] = OrderedDict()  # held, and evictable when they came

    @property
    def remembered(self) -> int:
        """Number of blocks that have left and are remembered."""
        return self._past.blocks

    def forget(self, blocks: int) -> None:
        """Forgets so many of those that have left, the earliest first."""
        self._past.forget(blocks)

    def known(self, id: BlockId) -> BlockHistory | None:
        """The history of a block that is held or remembered; None for any other."""
        return self._histories.get(id)

    def asked(self, blocks: Iterable[tuple[BlockId, int, float]], now: float) -> None:
        """A request needs blocks that are not held, each with its depth and seconds: it counts as a use, and is
        remembered. What was known of their places before may have been a guess."""
        histories: list[BlockHistory] = []
        for id, depth, seconds in blocks:
            history = self._histories.get(id)
            if history is None:
                history = self._histories[id] = BlockHistory(id, depth, seconds)
            elif history.entry is None:
                history.depth, history.seconds = depth, seconds
            histories.append(history)
        self._use(histories, now)
        for history in histories:
            if history.entry is None:
                self._past.remember(history)

    def used(self, run: Iterable[Entry], now: float) -> None:
        """A request uses these, which are held: tail to head, each once however often it is there."""
        self._use(list(dict.fromkeys(entry.history for entry in run if entry.history.entry is entry)), now)

    def _use(self, histories: Sequence[BlockHistory], now: float) -> None:
        self._eviction.refer_all(histories, now)
        for history in histories:
            history.uses += 1
            history.used = now

    def admits(self, history: BlockHistory, victim: Entry | None) -> bool:
        """True if the block is worth the place of `victim`, or a free one. What passes through has no worth to
        compare."""
        displaced = victim.history if victim is not None and not victim.history.passing else None
        return self._admission.admits(history, displaced)

    def enter(self, entry: Entry, now: float, *, passing: bool) -> None:
        """It is held from now on. What was never asked for is so now."""
        history = self._histories.get(entry.id)
        if history is None or history.entry is not None:  # there, but stuck in a read that no request waits for
            history = self._histories[entry.id] = BlockHistory(entry.id, 0, 1.0)
            self._use([history], now)
        entry.history = history
        history.entry, history.passing = entry, passing
        self._past.came(history)
        if not passing:
            self._eviction.enter(history)

    def may_stay(self, entry: Entry) -> bool:
        """True if it passes through and is worth as much as the block that the policy would evict for it."""
        history = entry.history
        passing = history.passing and history.entry is entry
        return passing and self._admission.admits(history, self._eviction.victim())

    def stay(self, entry: Entry) -> None:
        """Ends its passing through: the policy ranks it from now on."""
        self._passing.pop(entry, None)
        entry.history.passing = False
        self._eviction.enter(entry.history)
        self.offer(entry)

    def leave(self, entry: Entry) -> None:
        """Removes it; its history stays known for a while."""
        history = entry.history
        if history.passing:
            self._passing.pop(entry, None)
        else:
            self._eviction.leave(history)
        history.entry, history.passing = None, False
        self._past.remember(history)

    def offer(self, entry: Entry) -> None:
        """Call whenever a block may have become evictable."""
        history = entry.history
        if history.entry is not entry:
            return  # it has left, and a copy of it still runs
        if not history.passing:
            self._eviction.offer(history)
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
        return victim.entry if isinstance(victim, BlockHistory) else None

    def few(self, n: int) -> list[Entry]:
        """At most `n` of those that will go soon, the next among them: not all of them in their order."""
        found = [entry for entry in islice(self._passing, n) if entry.evictable]
        for item in islice(self._eviction.few(n), n - len(found)):
            if isinstance(item, BlockHistory) and item.entry is not None and item.evictable:
                found.append(item.entry)
        return found

    def wrong(self) -> str:
        """Describes what does not add up, '' if all does; for tests."""
        held = any(history.entry is not None for history in self._past)
        gone = (history for history in self._histories.values() if history.entry is None)
        return "something is held and remembered as well" if held else self._past.wrong(gone)

    def _forget(self, history: BlockHistory) -> None:
        self._eviction.forget(history)
        history.uses = 0
        if self._histories.get(history.id) is history:
            del self._histories[history.id]
