"""Content of a tier that holds blocks of a prefix, and windows or states that go with them, in one capacity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stepwell.policies.catalog import TierPolicy
from stepwell.policies.past import Past, most_remembered
from stepwell.simulate.store import MOMENT_S

PartKey = tuple[int, int]
"""The id of a block, and -1 for its part of the prefix or the number of a rule of the tail."""


class StoredPart:
    """A part of a block: an `Item` of policies, as each is in a well. `children`: parts of the prefix behind it that
    are held."""

    __slots__ = ("children", "held", "key", "listed", "note", "parent", "seconds", "size", "used", "uses")

    def __init__(self, key: PartKey, size: int, seconds: float, parent: StoredPart | None) -> None:
        self.key = key
        self.size = size
        self.seconds = seconds
        self.parent = parent
        self.children = 0
        self.held = False
        self.uses = 0
        self.used = 0.0
        self.note: Any = None
        self.listed = 0

    @property
    def is_tail(self) -> bool:
        return self.key[1] >= 0

    @property
    def evictable(self) -> bool:
        return self.held and not self.children


class PartStore:
    """`capacity`, in the unit of sizes, under one policy. `unit`: the size of a block of the prefix. For each request:
    `begin`, `use` of what it finds, `let_in` of what it has then, `settle`."""

    def __init__(self, policy: TierPolicy, capacity: int, unit: int) -> None:
        self._capacity = capacity
        self._eviction, self._admission = policy.eviction, policy.admission
        self._past = Past[StoredPart](most_remembered(capacity // unit) * unit, self._forget)
        self._now = -1.0
        self.parts: dict[PartKey, StoredPart] = {}
        self.held = self.held_tails = 0
        self.entered = self.entered_tails = 0  # each time

    def begin(self, time: float) -> None:
        self._now = max(time, self._now + MOMENT_S)

    def has(self, key: PartKey) -> bool:
        part = self.parts.get(key)
        return part is not None and part.held

    def part(self, key: PartKey, size: int, seconds: float, parent: StoredPart | None = None) -> StoredPart:
        found = self.parts.get(key)
        if found is None:
            found = self.parts[key] = StoredPart(key, size, seconds, parent)
        elif not found.held:
            found.parent = parent  # another object, if the one before was forgotten
        return found

    def use(self, parts: Sequence[StoredPart]) -> None:
        """These are needed now, held or not: tail to head."""
        self._eviction.refer_all(parts, self._now)
        for part in parts:
            part.uses += 1
            part.used = self._now

    def let_in(self, parts: Iterable[StoredPart]) -> None:
        """Those that are not held, one after the other until something is refused."""
        for part in parts:
            if not (part.held or self._let_in(part)):
                break

    def settle(self, parts: Sequence[StoredPart]) -> None:
        """The request has ended: these are held, or remembered."""
        for part in reversed(parts):
            if part.held:
                self._eviction.offer(part)
            else:
                self._past.remember(part)

    def drop(self, part: StoredPart) -> None:
        """It is held no more."""
        part.held = False
        self._count(-part.size, tail=part.is_tail)
        self._eviction.leave(part)
        self._past.remember(part)
        self._without(part.parent)

    def _let_in(self, part: StoredPart) -> bool:
        if part.parent is not None:
            if not part.parent.held:
                return False
            part.parent.children += 1  # first of all, so that room is not made by evicting it
        if not self._make_room(part):
            self._without(part.parent)
            return False
        part.held = True
        self._past.came(part)
        self._count(part.size, tail=part.is_tail)
        self.entered += part.size
        self.entered_tails += part.size * part.is_tail
        self._eviction.enter(part)
        return True

    def _make_room(self, part: StoredPart) -> bool:
        if self._capacity - self.held >= part.size:
            return self._admission.admits(part, None)
        while self._capacity - self.held < part.size:
            victim = self._eviction.victim()
            if victim is None or not self._admission.admits(part, victim):
                return False
            assert isinstance(victim, StoredPart)
            self.drop(victim)
        return True

    def _count(self, size: int, *, tail: bool) -> None:
        self.held += size
        self.held_tails += size * tail

    def _without(self, parent: StoredPart | None) -> None:
        """One child less of this part is held."""
        if parent is not None:
            parent.children -= 1
            if parent.held:
                self._eviction.offer(parent)

    def _forget(self, part: StoredPart) -> None:
        self._eviction.forget(part)
        part.uses = 0
        if self.parts.get(part.key) is part:
            del self.parts[part.key]
