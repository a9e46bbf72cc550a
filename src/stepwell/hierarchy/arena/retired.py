"""Retired slabs, until their bytes are free: the system has the pages back, and no member keeps them.

A member whose driver pins memory keeps the pages of each slab that was shared with it, whatever the well does to them,
until it says that it does not or its process ends (`Slab.keepers`). Plain data structure of the arena's.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell.errors import CapacityError
from stepwell.hierarchy.arena.arena import ArenaObserver
from stepwell.hierarchy.arena.records import Owner, Retirement, Slab, SlabPhase
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor

KEPT_S = 30.0
"""Seconds within which a member unmaps a retired slab: copies in it, its driver's work, and that on slabs before it. A
member that takes longer is not waited for, though its bytes count."""


class Retired:
    """`gone` is called with each slab whose bytes are free, and with the owner that is to get a slab for it. The
    observer hears once of each that is kept for too long."""

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        gone: Callable[[Slab, Owner | None], None],
        observer: ArenaObserver,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._gone = gone
        self._observer = observer
        self._slabs: dict[int, Slab] = {}
        self.bytes = 0
        self.kept = 0  # of these, those that only wait for members

    def add(self, slab: Slab, heir: Owner | None = None) -> None:
        """Gives the slab's pages back. The heir may get a slab of its own when its bytes are free."""
        slab.phase = SlabPhase.RETIRED
        slab.retirement = retirement = Retirement(self._clock.now(), heir)
        self._slabs[slab.number] = slab
        self.bytes += slab.layout.nbytes

        def punched(error: BaseException | None) -> None:
            if slab.number in self._slabs:  # not closed meanwhile
                retirement.punched = True
                self.kept += slab.layout.nbytes
                self.part_with(slab)

        self._executor.submit(slab.memory.punch, punched)

    def part_with(self, slab: Slab) -> None:
        """Frees the slab if its pages are given back and no member keeps them."""
        retirement = slab.retirement
        if retirement is None or not retirement.punched or slab.keepers:
            return
        del self._slabs[slab.number]
        self.bytes -= slab.layout.nbytes
        self.kept -= slab.layout.nbytes
        self._gone(slab, retirement.heir)

    def overdue(self) -> list[Slab]:
        """Slabs that members have kept for too long."""
        if not self.kept:
            return []
        past = self._clock.now() - KEPT_S
        found: list[Slab] = []
        for slab in self._slabs.values():
            retirement = slab.retirement
            if retirement is None or not retirement.punched or retirement.since > past:
                continue
            found.append(slab)
            if not retirement.told:
                retirement.told = True
                self._observer.troubled(_kept(slab))
        return found

    def clear(self) -> None:
        self._slabs.clear()
        self.bytes = self.kept = 0


def _kept(slab: Slab) -> CapacityError:
    return CapacityError(
        "SW-207",
        what=f"an engine keeps {slab.layout.nbytes} bytes of host memory that were taken from it",
        why=f"{len(slab.keepers)} of its processes have not unmapped them within {KEPT_S:g} s",
        fix="nothing, if it is gone soon; else restart that engine: see whether its GPU hangs",
    )
