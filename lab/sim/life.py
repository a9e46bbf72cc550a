"""One life of a well: from when it opens what it finds, to when it is stopped, killed, or the power goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from lab.sim.disk import Disk
from lab.sim.fibres import Fibres
from lab.sim.files import SimFiles
from lab.sim.oracle import Violation
from lab.sim.setup import Setup
from lab.sim.trace import Trace
from stepwell.hierarchy.core import Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.saved import PauseRecord, SavedState, StateStore
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.executor import Executor
from stepwell.io.staging import Staging
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.testing.clock import SetClock
from stepwell.testing.remote_tier import RemoteTier, Store
from stepwell.testing.sparse import SparseMemory
from stepwell.tiers.base import Tier
from stepwell.tiers.disk.tier import DiskTier, Site
from stepwell.tiers.faulty import FaultySharedTier
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys


@dataclass(slots=True)
class Surroundings(StateStore):
    """What outlives a well: its keys, the time, and buffers. `wall_offset` is how wrong the wall clock is, seconds;
    `segments`: how many the next well may have in each directory; `paused`: what home says of that; `store`: what a
    remote tier holds."""

    setup: Setup
    dice: Random
    keyring: Keyring
    clock: SetClock = field(default_factory=lambda: SetClock(100.0))
    wall_offset: float = 1_800_000_000.0
    staging: Staging = field(default_factory=lambda: Staging(1))
    segments: int = 0
    paused: list[PauseRecord] = field(default_factory=list)
    store: Store = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segments = self.setup.segments

    def save_paused(self, paused: Sequence[PauseRecord]) -> None:
        self.paused = list(paused)

    def wall(self) -> float:
        return max(1.0, self.wall_offset + self.clock.now())


def keyring(dice: Random) -> Keyring:
    return Keyring((TenantKeys("default", (Epoch(1, dice.randbytes(32)),)),))


def make_well(
    around: Surroundings,
    files: Sequence[SimFiles],
    executor: Executor,
    memory: SparseMemory,
    trouble: Callable[[str, BaseException], None],
    host_bytes: int | None = None,
) -> tuple[Hierarchy, Sealing]:
    setup = around.setup
    entropy = around.dice.randbytes
    sealing = Sealing(around.keyring, sealed=setup.sealed, wall=around.wall, entropy=entropy)
    limit = setup.segment * around.segments
    sites = [Site(each, limit, setup.reserve, setup.segment) for each in files]
    disk = DiskTier(sites, executor, around.clock, around.wall, sealing, trouble, entropy, around.staging)
    tiers: list[Tier] = [disk]
    if setup.remote:
        far = RemoteTier(limit, executor, around.store)
        tiers.append(FaultySharedTier(far, around.dice.randrange(1 << 32)))
    limits = Limits(
        setup.host_bytes if host_bytes is None else host_bytes,
        queue_bytes=setup.queue_bytes,
        readers=setup.readers,
        slab_bytes=4096,
    )
    hierarchy = Hierarchy(
        limits,
        System(around.clock, executor, memory, entropy),
        sealing,
        Options(placement=PLACEMENTS[setup.placement](), write=WRITE_POLICIES[setup.write](), prefetch=setup.prefetch),
        well="sim",
        tiers=tiers,
        policy=POLICIES[setup.policy],
        saved=SavedState(paused=around.paused),
        store=around,
    )
    return hierarchy, sealing


class Life:
    """A well over `disks`. `far`: its remote tier, if it has one. `alive` until it was stopped or killed."""

    def __init__(self, around: Surroundings, disks: Sequence[Disk], trace: Trace, seen: Counter[str]) -> None:
        self.alive = True
        self.clock = around.clock
        self.fibres = Fibres(around.dice)
        self.memory = SparseMemory()
        self.files = [SimFiles(disk, around.dice, self.fibres, trace, seen) for disk in disks]
        self.hierarchy, self.sealing = make_well(around, self.files, self.fibres, self.memory, self._trouble)
        last = self.hierarchy.stack.levels[-1].tier
        self.far = last if isinstance(last, FaultySharedTier) else None
        self.hierarchy.recover()

    @staticmethod
    def _trouble(kind: str, error: BaseException) -> None:
        if not isinstance(error, OSError | OverflowError):
            raise Violation("books", f"a job raised {error!r} ({kind})") from error

    def turn(self, most: int) -> None:
        for _ in range(most):
            if not self.hierarchy.turn():
                break

    def settle(self, between: Callable[[], bool] = lambda: False) -> None:
        """All that can happen without time: turns, jobs, and what `between` says it has done."""
        for _ in range(100_000):
            busy = self.hierarchy.turn()
            busy = self.fibres.step() or busy
            if not between() and not busy:
                return
        raise Violation("books", "the well is never done")

    def stop(self, patience_s: float) -> bool:
        """Ends as a well that is asked to: what waits is written, if the disk lets it in that time, and footers are.
        Whether all was."""
        drained: list[bool] = []
        until = self.clock.now() + patience_s
        self.hierarchy.drain(lambda: drained.append(True))
        self.settle()
        while not drained and self.clock.now() < until:
            self.clock.advance(0.1)
            self.settle()
        self.hierarchy.close()
        self._end()
        if handles := sum(files.handles for files in self.files):
            raise Violation("books", f"{handles} files are open after the well was closed")
        return bool(drained)

    def kill(self) -> None:
        """At this moment, whatever is under way."""
        for files in self.files:
            files.dead = True
        self.fibres.kill()
        self._end()

    def _end(self) -> None:
        self.alive = False
        self.fibres.close()
        for shared in self.memory.made:
            shared.close()
