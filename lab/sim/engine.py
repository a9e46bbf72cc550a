"""An engine: a scheduler and its workers, each a process with the real client, and what they are busy with.

Its requests ask, wait for as long as the client's patience lasts, recall what was offered and go on; blocks that it has
computed are spilled. Copies take their time: a process whose connection is lost goes on with its own until they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from lab.sim.limits import Queue, StreamWait
from lab.sim.oracle import Fill, Identity
from lab.sim.setup import Model
from stepwell.block.digest import Chain
from stepwell.client import scheduler as client
from stepwell.client import worker
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.questions import PrefixQuestion, SlotRefs, Spill
from stepwell.client.streams import Stream, StreamLimits
from stepwell.client.worker import Hold
from stepwell.engines.common.requests import TailSearch, Tracked
from stepwell.errors import IntegrityError, StepwellError
from stepwell.io.clock import Clock
from stepwell.io.memory import Bytes
from stepwell.protocol.link import Dial


class Worker(worker.WorkerClient):
    """Maps and unmaps when it is told to, as its mapping thread would. `pins`: a driver keeps its slabs in memory."""

    def __init__(
        self,
        identity: WorkerIdentity,
        find: Callable[[], Dial],
        trouble: Callable[[StepwellError], None],
        clock: Callable[[], float],
        *,
        pins: bool,
    ):
        self.jobs: list[Callable[[], None]] = []
        self.copies: list[Copy | StreamCopy] = []
        prepare = self._register if pins else None
        super().__init__(identity, find, trouble=trouble, prepare=prepare, clock=clock, threaded=False)

    @staticmethod
    def _register(whole: Bytes) -> Callable[[], None]:
        return lambda: None

    @property
    def kept(self) -> dict[worker.Key, int]:
        """Bytes of each slab that is in memory because of this process, by session and number."""
        known = self._slabs._known.items() if self._pins else ()
        return {key: len(slab._mapping.bytes) for key, slab in known if slab._mapping is not None}

    def _do(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def map(self) -> bool:
        """Maps or unmaps one slab. False: there is none."""
        if not self.jobs:
            return False
        self.jobs.pop(0)()
        return True


class Phase(Enum):
    WAITING = "waiting"
    OFFERED = "offered"
    COPYING = "copying"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt that arrived; `asked`: after how many events. `digests` are asked for, and `names` those that the oracle
    has for them. `offered` blocks can be recalled, those from `first` on
    are. `good`: leading ones that every rank has copied; `got`: all that they have, by rank. `streams`: as a stream, if
    it can be. `failed`: the block behind the good ones is not what was leased. `ended`: why ranks have ended a stream.
    """

    number: int
    asked: int
    epoch: int
    digests: bytes
    names: list[bytes]
    ask: PrefixQuestion | None
    phase: Phase = Phase.WAITING
    offered: int = 0
    first: int = 0
    good: int = 0
    missing: set[int] = field(default_factory=set)
    got: dict[int, list[Bytes]] = field(default_factory=dict)
    streams: bool = False
    failed: bool = False
    ended: Counter[str] = field(default_factory=Counter)
    tail: Tail | None = None


@dataclass(slots=True, eq=False)
class Tail:
    """Of a request of a model with several cache groups: the connector's own search for a place where it can go on,
    behind the first `computed` tokens. `blocks` is where it was found. `judged`: what a look said."""

    tracked: Tracked
    chain: Chain
    search: TailSearch
    computed: int
    blocks: int = 0
    judged: bool = False


@dataclass(slots=True, eq=False)
class Spilling:
    """Blocks that were computed and are to be spilled, by the names that the oracle has for them."""

    epoch: int
    names: list[bytes]
    spill: Spill
    since: float


@dataclass(slots=True, eq=False)
class Copy:
    """One rank's copy of a few blocks, a half of each block at a time: into the engine for a `request`, or out of it (a
    spill), of `fills` with `leases`. It may be a piece of a `stream`."""

    worker: Worker
    rank: int
    shard: int
    session: int
    refs: SlotRefs
    leases: list[int]
    fills: list[Fill]
    request: Request | None = None
    transfers: list[int] = field(default_factory=list)
    stream: StreamCopy | None = None
    held: Hold | None = None
    slots: list[Bytes] = field(default_factory=list)
    buffers: list[Bytes] = field(default_factory=list)
    running: bool = False
    half: int = 0

    def where(self) -> Iterator[tuple[int, int, int]]:
        """Slab, slot and generation of each block."""
        for row in self.refs:
            yield int(row["slab"]), int(row["slot"]), int(row["generation"])

    def begin(self) -> None:
        """Takes as many leading slots as the worker has a right to."""
        self.running = True
        self.held = hold = self.worker.hold()
        try:
            for place in self.where():
                self.slots.append(hold.slot(self.session, *place).bytes)
        except IntegrityError:
            pass  # the rest is not copied

    def end(self) -> None:
        """Nothing of the arena is touched any more."""
        self.slots.clear()
        self.running = False
        if self.held is not None:
            self.held.close()
        self.worker.copies.remove(self)


@dataclass(slots=True, eq=False)
class StreamCopy:
    """One rank's copies of `blocks` blocks that come as a stream, in pieces as they land. `good`: leading ones whose
    copies have ended. `slow`: it takes its time. `wait`: whether it waits too long."""

    worker: Worker
    rank: int
    shard: int
    session: int
    request: Request
    transfer: int
    blocks: int
    limits: StreamLimits
    wait: StreamWait
    slow: bool
    stream: Stream | None = None
    copying: bool = False
    good: int = 0
    buffers: list[Bytes] = field(default_factory=list)

    def end(self) -> None:
        """It waits for nothing any more."""
        if self.stream is not None:
            self.stream.__exit__()
        self.worker.copies.remove(self)


class Engine:
    """One engine with all its processes. `dial(process)` is how process n of it (0: the scheduler) reaches the well."""

    def __init__(
        self,
        number: int,
        kind: int,
        model: Model,
        clock: Clock,
        dial: Callable[[Engine, int], Dial],
        trouble: Callable[[StepwellError], None],
    ) -> None:
        self.number = number
        self.kind = kind
        self.model = model
        self.alive = True
        self.now = clock.now
        self.requests: list[Request] = []
        self.spills: list[Spilling] = []
        self.queue = Queue()
        self.lanes = 1 + number % 3  # streams that a worker copies at a time
        name = f"engine {number}"
        self.workers = [
            Worker(
                WorkerIdentity(name, rank, model.world, model.shard_bytes, b"l" * 32, model.replicas),
                lambda rank=rank: dial(self, 1 + rank),  # type: ignore[misc]
                trouble,
                clock.now,
                pins=number % 2 == 0,
            )
            for rank in range(model.world)
        ]
        self.scheduler = client.SchedulerClient(
            EngineIdentity(name, model.world, model.shard_bytes, 16, b"l" * 32, b"m" * 32, name, model.replicas),
            lambda: model.weights,
            lambda: dial(self, 0),
            trouble=trouble,
            clock=clock.now,
            threaded=False,
        )

    @property
    def clients(self) -> list[client.SchedulerClient | Worker]:
        return [self.scheduler, *self.workers]

    @property
    def copies(self) -> list[Copy | StreamCopy]:
        return [copy for each in self.workers for copy in each.copies]

    @property
    def busy(self) -> bool:
        return bool(self.requests or self.spills or self.copies)

    def identity(self, epoch: int, name: bytes) -> Identity:
        return self.kind, epoch, name

    def exit(self) -> None:
        """All its processes end, in the middle of whatever they do."""
        self.alive = False
        for copy in self.copies:
            copy.end()
        for each in self.clients:
            each.membership.close()
        for each in self.workers:
            while each.map():
                pass


def names_of(digests: bytes) -> list[bytes]:
    return [digests[at : at + 32] for at in range(0, len(digests), 32)]


def halves(nbytes: int) -> tuple[slice, slice]:
    middle = nbytes // 16 * 8
    return slice(0, middle), slice(middle, nbytes)


def empty(nbytes: int) -> Bytes:
    return np.zeros(nbytes, np.uint8)
