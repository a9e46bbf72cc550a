"""Owners that have no slab and could not be given one when they asked for it.

Plain data structure of the arena's. An owner is in the queue from the refusal until its first slab is being made or its
last engine has gone, so an engine that joins a full well has memory before it first spills. First come first served,
but what is too little for the first may be enough for one behind it: it is passed over, MAX_PASSES times. Then it is
its turn: whatever becomes free is kept for it, until it has its slab or TURN_S have passed, and then it is the last.
"""

from __future__ import annotations

from stepwell.hierarchy.arena.records import Owner
from stepwell.io.clock import Clock

LOOK_S = 1.0
"""Time between two attempts while an owner waits and nothing else happens: pins end, and slabs that were made a moment
ago may be taken after a while. Also the pause after a slab could not be made."""

MAX_PASSES = 4
"""Slabs that others get while an owner is the first in the queue, before it is its turn."""

TURN_S = 60.0
"""Seconds of a turn, as long as a request may wait with pins. What is not free by then may never be, and others
wait."""


class SlabQueue:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._owners: dict[Owner, None] = {}
        self._due = 0.0
        self._not_before = 0.0
        self._passes = 0  # of the first
        self._turn_ends = 0.0

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._owners

    def enter(self, owner: Owner, *, failed: bool = False) -> None:
        """The owner was refused a slab; one that is here keeps its place. `failed`: memory for it could not be had.
        Refusals move no attempt that is due, or an owner that asks all the time would put it off for all."""
        now = self._clock.now()
        if not self._owners:
            self._due = now + LOOK_S
        if failed and now >= self._not_before:
            self._not_before = now + LOOK_S
        self._owners[owner] = None

    def leave(self, owner: Owner) -> None:
        """Removes the owner, which needs no slab."""
        if owner == self._first:
            self._passes = 0
        self._owners.pop(owner, None)

    def given(self, owner: Owner) -> None:
        """The owner gets a slab, whether it is in the queue or not; if another is the first, that is passed over."""
        passed = self._first not in (None, owner)
        self.leave(owner)
        if passed:
            self._passes += 1
            self._turn_ends = self._clock.now() + TURN_S
            self._turn_ends = self._clock.now() + TURN_S

    def turn(self) -> Owner | None:
        """The owner for which all is kept that becomes free, if there is one."""
        first = self._first
        if first is None or self._passes < MAX_PASSES:
            return None
        if self._clock.now() < self._turn_ends:
            return first
        self.leave(first)
        self._owners[first] = None
        return None

    def waiting(self) -> tuple[Owner, ...]:
        """Owners that may be given slabs now, the one that has waited longest first; puts the next attempt off."""
        now = self._clock.now()
        self._due = now + LOOK_S
        return tuple(self._owners) if now >= self._not_before else ()

    @property
    def _first(self) -> Owner | None:
        return next(iter(self._owners), None)

    @property
    def next_moment(self) -> float | None:
        """When the next attempt is due; None: no owner waits."""
        return self._due if self._owners else None
