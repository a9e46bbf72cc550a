"""An engine with a fixed little work that is killed at its N-th call of a kind, beside one that goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lab.trust.budget import Budget
from lab.trust.kills.engine import Engine
from lab.trust.kills.engines import MODEL, SHARD_BYTES, Beside
from lab.trust.kills.ground import ground
from lab.trust.kills.lanes import Tally
from lab.trust.kills.nth.calls import hindered
from lab.trust.kills.nth.wells import KILL
from lab.trust.kills.processes import PATIENCE_S, Ended, ForkServer
from lab.trust.kills.work import joined

CALLS: Sequence[str] = (
    "sendmsg",
    "recvmsg",
    "poll",
    "mmap",
    "munmap",
    "madvise",
    "futex",
    "connect",
    "clock_nanosleep",
)
"""Of its links, its shared memory, its threads, and of its copies: those pause in the middle of each block."""


def kills(budget: Budget, number: int, most: int) -> Tally:
    """A lane: one kind of call. In the size of CI N grows by half each time, so that few kills get far."""
    with ground() as place, ForkServer(place) as wells, ForkServer(place) as victims:
        disk = f"{place.disk}:256MiB"
        well = wells.well(place.home, {"host": "64MiB", "disk": disk, "disk_reserve": "1MiB"})
        with Engine(place.home, MODEL, SHARD_BYTES) as engine:
            if not (well.ready() and joined(engine, well)):
                raise TimeoutError(f"a well does not answer: {place.said()}")
            beside = Beside(place, engine, victims, budget.dice("kills", "nth", number))
            nth, n = Nth(beside, CALLS[number]), 1
            for _ in range(most):
                if budget.over or engine.lost or not nth.one(n):
                    break
                n += 1 + (n // 2 if budget.scale is None else 0)
            else:
                beside.tally.n["cut"] += 1
            if engine.lost:
                beside.tally.violated("left", f"the well ended: {place.said()}")
        return beside.tally


@dataclass(slots=True)
class Nth:
    """Counts and violations are those of `Beside`."""

    beside: Beside
    call: str

    def one(self, n: int) -> bool:
        """False: there was no N-th call; then the victim ends by itself, and nothing is held for it either."""
        beside = self.beside
        victim, first = beside.order("once", held=True)
        try:
            with hindered(victim.pid, beside.place.folder / "strace", f"?{self.call}", KILL, n):
                victim.go()
                deadline = time.monotonic() + PATIENCE_S
                while victim.alive() and not beside.engine.lost and time.monotonic() < deadline:
                    beside.work()
                ended = victim.wait()
        except TimeoutError:
            ended = Ended(1, what="it hung")
        finally:
            victim.kill()
            victim.wait()
        if ended == Ended(-9):
            beside.is_dead(first)
            return True
        if ended != Ended(0):
            what = f"an engine that was not killed at {self.call} {n}: {ended} {beside.place.said()}"
            beside.tally.violated("left", what)
        beside.given_back()
        return False
