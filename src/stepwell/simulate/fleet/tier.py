"""One tier of a simulated fleet: what it holds, how fast it is, and what is written to it."""

from __future__ import annotations

from collections.abc import Callable

from stepwell.policies.admission.base import Admission
from stepwell.policies.catalog import POLICIES, TierPolicy
from stepwell.policies.costs.transfer import TierSpeed
from stepwell.policies.item import Item
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.simulate.fleet import description
from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.fleet.server import ServerJob, SharedServer
from stepwell.simulate.fleet.view import LevelWatch, Unseen
from stepwell.simulate.store import Store, stretches
from stepwell.simulate.traces.forest import BlockRun, Cost
from stepwell.simulate.traces.trace import Trace

GPU = "gpu"


class _Written(Admission):
    """Writes blocks after this many uses, if the policy lets them in too."""

    def __init__(self, policy: Admission, write: WritePolicy) -> None:
        self._policy = policy
        self._write = write

    def admits(self, item: Item, victim: Item | None) -> bool:
        return self._write.at_spill(item.uses) and self._policy.admits(item, victim)


class SimulatedLevel:
    """Common part of all levels, the GPU's pages included: a store, and the level below, which takes the blocks that
    leave it."""

    def __init__(self, name: str, new_store: Callable[[Callable[[BlockRun], None]], Store], watch: LevelWatch) -> None:
        self.name = name
        self.below: SimulatedTier | None = None
        self.up = True
        self._new_store = new_store
        self._watch = watch
        self._store = new_store(self._evicted)

    @property
    def held(self) -> int:
        """Number of blocks held."""
        return self._store.held

    def refer(self, now: float, first: int, last: int) -> list[tuple[int, int]]:
        """A request asks for these ids of the trace. Positions of those that can be had here."""
        path = self._store.refer(now, first, last)
        return stretches(path) if self.up else []

    def leading(self, first: int, last: int) -> int:
        """Number of leading blocks that this level alone holds."""
        held = stretches(self._store.path(first, last))
        return held[0][1] if held and not held[0][0] else 0

    def there(self, first: int, last: int) -> None:
        """These blocks are in the GPU now, computed or recalled."""
        self._enter(self._store.path(first, last))

    def lose(self) -> None:
        """Loses all blocks."""
        self._store = self._new_store(self._evicted)
        self._watch.lost()

    def _enter(self, path: list[BlockRun], most: int | None = None) -> int:
        """Lets blocks in; returns their number."""
        before = self._store.entered
        for run in self._store.offer(path, most):
            self._watch.changed(run, held=True)
        return self._store.entered - before

    def _evicted(self, run: BlockRun) -> None:
        self._watch.changed(run, held=False)
        if self.below is not None:
            self.below.take(run)


class SimulatedTier(SimulatedLevel):
    """Reads and writes have a queue each and do not slow each other. What waits to be written can be read. Blocks that
    find no room in the queue of writes are dropped and counted."""

    def __init__(
        self, name: str, like: description.TierDescription, clock: EventClock, trace: Trace, cost: Cost,
        block_bytes: int, *, watch: LevelWatch | None = None, most: float,
    ) -> None:  # fmt: skip
        """`most`: largest bandwidth of one recall in bytes per second, whatever the tier could."""
        capacity = like.capacity // block_bytes
        super().__init__(
            name, lambda left: Store(trace, policy_of(like), capacity, cost, left), watch if watch else Unseen()
        )
        self._like = like
        self._back = _writes_back(like)
        self._block_bytes = block_bytes
        self._most = most
        self._factors: list[float] = []  # factors by which it is slower now
        self._gone = 0  # reasons why it cannot be reached now
        self._queue_bytes = like.write_queue if like.write_queue is not None else like.capacity
        self.reads = SharedServer(clock, like.read_bandwidth, like.parallel, most)
        self._writes = SharedServer(clock, like.write_bandwidth)
        self.latency_s = like.latency
        self.read_bytes = self.written_bytes = self.dropped_bytes = 0

    @property
    def speed(self) -> TierSpeed:
        """Present speed, for one recall alone."""
        return TierSpeed(self.latency_s, 1 / min(self._most, self._like.read_bandwidth / self._slowed))

    @property
    def _slowed(self) -> float:
        return max(self._factors, default=1.0)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the reads that wait or are under way."""
        return int(self.reads.outstanding)

    def read(self, nbytes: int, landed: Callable[[], None], lost: Callable[[], None]) -> ServerJob:
        return self.reads.submit(nbytes, landed, lost=lost)

    def give_up(self, job: ServerJob) -> float:
        """Bytes of it that have not come."""
        return self.reads.drop(job)

    def there(self, first: int, last: int) -> None:
        path = self._store.path(first, last)
        if not self._back and self.up:
            self._write(path)
        else:
            self._store.settle(path)

    def take(self, run: BlockRun) -> None:
        """Takes a run that has left the level above. Blocks that are here already are not written again."""
        if not self._back or not self.up:
            return
        prefix = run.base - run.start
        self._store.path(prefix, run.base)  # so that no run reaches over its beginning
        path = self._store.path(prefix, run.base + run.size)
        self._write([part for part in path if part.start >= run.start])

    def slow(self, factor: float) -> None:
        """Slows the tier until `recover` is called as often as this. The largest of several factors holds."""
        self._factors.append(factor)
        self._run()

    def recover(self, factor: float) -> None:
        self._factors.remove(factor)
        self._run()

    def go(self) -> None:
        """Makes the tier unreachable until `come_back` is called as often as this; its content stays."""
        self._gone += 1
        self.up = False
        self.reads.fail()
        self._writes.fail()

    def come_back(self) -> None:
        self._gone -= 1
        self.up = not self._gone

    def lose(self) -> None:
        self.reads.fail()
        self._writes.fail()
        super().lose()

    def _run(self) -> None:
        self.reads.run_at(self._like.read_bandwidth / self._slowed)
        self._writes.run_at(self._like.write_bandwidth / self._slowed)

    def _write(self, path: list[BlockRun]) -> None:
        missing = sum(run.size for run in path if not run.held)
        if not missing:
            self._store.settle(path)
            return
        room = max(0, self._queue_bytes - int(self._writes.outstanding)) // self._block_bytes
        came = self._enter(path, room)
        if came == room < missing:
            self.dropped_bytes += (missing - room) * self._block_bytes
        if came:
            self.written_bytes += came * self._block_bytes
            self._writes.submit(came * self._block_bytes, _nothing)


def policy_of(like: description.TierDescription) -> TierPolicy:
    """A new one."""
    policy = POLICIES[like.policy]()
    if _writes_back(like):
        return policy
    return TierPolicy(policy.eviction, _Written(policy.admission, WRITE_POLICIES[like.write]()))


def _writes_back(like: description.TierDescription) -> bool:
    """Whether blocks that leave the level above are written."""
    return WRITE_POLICIES[like.write]().ahead(like.capacity) > 0


def _nothing() -> None:
    pass
