"""Engines that talk to a hierarchy without sockets or processes: each member by hand, with the shared memory real.

`Rig` is a hierarchy with everything injected; `FakeEngine` is one session's scheduler and workers. Nothing happens by
itself: messages are handled when said, work is done in `turns`, jobs in `executor.step`, slabs are mapped in `map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stepwell.block.layout import PAGE
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.codecs.base import Codec
from stepwell.hierarchy import audit
from stepwell.hierarchy.core import Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.saved import SavedState, Tags
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Peer
from stepwell.io.executor import Executor
from stepwell.io.memory import Bytes, Mapping
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.through import Through
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.sparse import SparseMemory
from stepwell.tiers.base import Tier
from stepwell.vault.keyring import Keyring

Kind = TypeVar("Kind", bound=m.Message)
Refs = npt.NDArray[np.void]
"""SLOT_REF rows of shape (blocks, shards)."""


class Rig:
    def __init__(
        self,
        host_bytes: int,
        *,
        seed: int,
        keyring: Keyring | None = None,
        tiers: Callable[[Executor], Sequence[Tier]] = lambda executor: (),
        queue_bytes: int = 256 << 20,
        sealed: bool = True,
        barred: Sequence[Tags] = (),
        policy: str = "lru",
        placement: str = "by_worth",
        write: WritePolicy | None = None,
        prefetch: bool = False,
        tenants: int = 1,
        codec: Codec | None = None,
    ) -> None:
        self.clock = SetClock()
        self.executor = SeededExecutor(seed)
        self.memory = SparseMemory()
        self.keyring = keyring or Keyring.ephemeral()
        self.members: list[FakeMember] = []
        self.tiers = tiers(self.executor)
        self.hierarchy = Hierarchy(
            Limits(host_bytes, queue_bytes=queue_bytes),
            System(self.clock, self.executor, self.memory),
            Sealing(self.keyring, sealed=sealed, wall=lambda: 1_800_000_000.0, codec=codec),
            Options(placement=PLACEMENTS[placement](), write=write or Through(), prefetch=prefetch),
            well="rig",
            tiers=self.tiers,
            policy=POLICIES[policy],
            tenants=tenants,
            saved=SavedState(barred),
        )

    def turns(self, limit: int = 10_000) -> None:
        """All work that is queued. Raises RuntimeError if it never ends."""
        for _ in range(limit):
            if not self.hierarchy.turn():
                return
        raise RuntimeError("the hierarchy is never done")

    @property
    def resident_bytes(self) -> int:
        """Memory that the slabs take: the well's, and those whose pages a process keeps."""
        slabs = {slab.number: slab.layout.nbytes for slab in self.hierarchy.slabs.slabs.values()}
        for member in self.members:
            slabs |= {number: member.shared[number].nbytes for number in member.kept}
        return sum(slabs.values())

    def settle(self, *, check: bool = True) -> None:
        """Everything that can happen without a new message of a scheduler or a copy: jobs, completions, mapping and
        unmapping. Then the books are checked, unless the caller does so often enough."""
        for _ in range(1000):
            self.turns()
            self.executor.drain()
            busy = [member.map() + member.unmap() for member in self.members if not member.gone]
            if not any(busy) and not self.hierarchy.turn() and not self.executor.pending:
                break
        else:
            raise RuntimeError("the rig does not come to rest")
        if check:
            audit.hierarchy(self.hierarchy)


class Unheard:
    """A connection whose other end listens to nothing."""

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        pass

    def sever(self) -> None:
        pass


class FakeMember:
    """One connection. `gone`: it has ended, from either side; its mappings stay, as a zombie's do."""

    def __init__(
        self, rig: Rig, hello: m.Hello, *, watched: bool = True, tenant: str = DEFAULT_TENANT, uid: int = 0
    ) -> None:
        self.rig = rig
        self.inbox: list[m.Message] = []
        self.shared: dict[int, m.SlabShared] = {}
        self.unmapped: list[int] = []
        self.retired: list[int] = []  # to be unmapped by one that pins
        self.kept: set[int] = set()  # slabs whose pages this process keeps in memory
        self.hangs = False  # it unmaps nothing by itself
        self._pins = hello.pins
        self.gone = False
        self._mappings: dict[int, Mapping] = {}
        self.member = rig.hierarchy.join(Peer(uid, 0, watched, tenant), hello, self)
        self.gone = self.gone or self.member is None
        rig.members.append(self)

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        assert not self.gone, "a message to a member whose connection has ended"
        self.inbox.append(message)
        if isinstance(message, m.SlabShared):
            (fd,) = fds
            self.shared[message.slab] = message
            self._mappings[message.slab] = Mapping(fd, message.nbytes)
            self.unmapped.append(message.slab)
            if self._pins:
                self.kept.add(message.slab)
        elif isinstance(message, m.SlabRetired) and self._pins:
            self.retired.append(message.slab)

    def sever(self) -> None:
        self.gone = True

    def take(self, kind: type[Kind]) -> list[Kind]:
        """The messages of this kind that came since the last call."""
        taken = [message for message in self.inbox if isinstance(message, kind)]
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return taken

    def say(self, message: m.FromEngine) -> None:
        if not self.gone and self.member is not None:
            self.rig.hierarchy.handle(self.member, message)

    def map(self, most: int = 1 << 30) -> int:
        """Reports up to `most` slabs as mapped; how many were."""
        slabs, self.unmapped = self.unmapped[:most], self.unmapped[most:]
        for slab in slabs:
            self.say(m.Mapped(slab))
        return len(slabs)

    def unmap(self) -> int:
        """Unmaps all that was retired, and says so; how many were."""
        slabs: list[int] = []
        if not self.hangs:
            slabs, self.retired = self.retired, []
        for slab in slabs:
            self.kept.discard(slab)
            self.say(m.Unmapped(slab))
        return len(slabs)

    def leave(self) -> None:
        """The connection ends; the process lives."""
        if not self.gone and self.member is not None:
            self.gone = True
            self.rig.hierarchy.left(self.member)

    def exit(self) -> None:
        """The process ends, and with it the connection."""
        self.gone = True
        self.kept.clear()
        if self.member is not None:
            self.rig.hierarchy.exited(self.member)

    def slot(self, ref: np.void) -> Bytes:
        shared = self.shared[int(ref["slab"])]
        at = shared.offset + int(ref["slot"]) * shared.stride
        return self._mappings[shared.slab].bytes[at : at + shared.stride]

    def holds(self, ref: np.void) -> bool:
        """The generation is the one of the reference: what a reader asks after its copy."""
        shared = self.shared[int(ref["slab"])]
        words = self._mappings[shared.slab].bytes[: 8 * shared.slots].view(np.uint64)
        return int(words[int(ref["slot"])]) == int(ref["generation"])


PLACES = (0, PAGE, SLOT // 2, SLOT - PAGE)
"""Where fakes write a word of a shard, one place after the other. Shards have at least SLOT bytes."""


def write(slot: Bytes, place: int, word: int) -> None:
    slot[PLACES[place] : PLACES[place] + 8].view(np.uint64)[0] = word


def read(slot: Bytes, place: int) -> int:
    return int(slot[PLACES[place] : PLACES[place] + 8].view(np.uint64)[0])


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine says about itself. Digests are 32 bytes."""

    weights: bytes = b"w" * 32
    model: bytes = b"m" * 32
    layout: bytes = b"l" * 32
    block_tokens: int = 128
    world: int = 1
    shard_bytes: int = SLOT
    pins: bool = False
    replicas: int = 1
    dtype: str = ""  # of its one cache group; empty: it says nothing of groups

    @property
    def groups(self) -> list[m.CacheGroup]:
        return [m.CacheGroup("full", 1, 1, 1, self.dtype, self.block_tokens, self.shard_bytes)] if self.dtype else []

    @property
    def shards(self) -> int:
        return self.world // self.replicas


@dataclass(frozen=True, slots=True)
class Answer:
    """All that the well said to one ask so far. `more` is None while it has said nothing."""

    refs: Refs
    more: bool | None
    reason: str


class FakeEngine:
    """A session. Fills and reads whole shards at once; tests that need steps use the members themselves."""

    def __init__(
        self,
        rig: Rig,
        model: Model = Model(),
        *,
        name: str = "engine",
        acknowledges: Sequence[int] = (),
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self.rig = rig
        self.tenant = tenant
        self.model = model
        self.name = name
        self._numbers = count(1)
        self._found: dict[int, list[m.Found]] = {}
        self._landed: dict[tuple[int, int], list[m.Landed]] = {}  # by rank and transfer
        self.workers = [FakeMember(rig, self.worker_hello(r, acknowledges), tenant=tenant) for r in range(model.world)]
        self.scheduler = FakeMember(rig, self.scheduler_hello(), tenant=tenant)

    def scheduler_hello(self, protocol: int = m.PROTOCOL) -> m.Hello:
        k = self.model
        return m.Hello(protocol, "scheduler", self.name, 0, k.world, k.shard_bytes, k.layout, k.weights, k.model,
                       k.block_tokens, replicas=k.replicas, groups=k.groups)  # fmt: skip

    def worker_hello(self, rank: int, acknowledges: Sequence[int] = ()) -> m.Hello:
        k = self.model
        return m.Hello(m.PROTOCOL, "worker", self.name, rank, k.world, k.shard_bytes, k.layout,
                       acknowledges=list(acknowledges), pins=k.pins, replicas=k.replicas)  # fmt: skip

    @property
    def members(self) -> list[FakeMember]:
        return [self.scheduler, *self.workers]

    @property
    def writers(self) -> list[FakeMember]:
        """By shard."""
        return self.workers[:: self.model.replicas]

    @property
    def live(self) -> bool:
        return not any(member.gone for member in self.members)

    @property
    def session(self) -> int:
        assert self.scheduler.member is not None
        return self.scheduler.member.session.number

    def number(self) -> int:
        return next(self._numbers)

    # asking -----------------------------------------------------------------------------------------------------------

    def ask(
        self, digests: bytes, *, epoch: int = 0, order: int | None = None, tokens: int = 0, recall: str = ""
    ) -> int:
        ticket = self.number()
        self.scheduler.say(m.Ask(ticket, epoch, ticket if order is None else order, digests, tokens, recall))
        return ticket

    def answer(self, ticket: int) -> Answer:
        for found in self.scheduler.take(m.Found):
            self._found.setdefault(found.ticket, []).append(found)
        said = self._found.get(ticket, [])
        rows = [np.frombuffer(f.slots, m.SLOT_REF).reshape(-1, self.model.shards) for f in said]
        starts = [f.start for f in said]
        assert starts == [sum(map(len, rows[:n])) for n in range(len(rows))], "blocks are told in order, once"
        assert all(f.more for f in said[:-1]), "nothing comes after a final answer"
        refs = np.concatenate([np.empty((0, self.model.shards), m.SLOT_REF), *rows])
        return Answer(refs, said[-1].more if said else None, said[-1].reason if said else "")

    def found(self, digests: bytes, *, epoch: int = 0) -> int:
        """Blocks that can be recalled now; asks and releases."""
        ticket = self.ask(digests, epoch=epoch)
        self.rig.settle()
        blocks = len(self.answer(ticket).refs)
        self.release(ticket)
        self.rig.settle()
        return blocks

    def release(self, ticket: int) -> None:
        self.scheduler.say(m.Release(ticket))

    def give_way(self, ticket: int) -> None:
        """Releases the run, and is told of it anew."""
        self.answer(ticket)
        del self._found[ticket]
        self.scheduler.say(m.Release(ticket, waits=True))

    def recall(self, ticket: int, first: int = 0, blocks: int = 1 << 20) -> int:
        transfer = self.number()
        self.scheduler.say(m.Recall(ticket, transfer, first, blocks))
        return transfer

    def stream(self, ticket: int, first: int = 0, blocks: int = 1 << 20) -> int:
        transfer = self.number()
        self.scheduler.say(m.Recall(ticket, transfer, first, blocks, streamed=True))
        return transfer

    def landed(self, transfer: int, rank: int = 0) -> Answer:
        """All that the well said to a rank of one stream so far."""
        for landed in self.workers[rank].take(m.Landed):
            self._landed.setdefault((rank, landed.transfer), []).append(landed)
        said = self._landed.get((rank, transfer), [])
        assert all(each.more for each in said[:-1]), "nothing comes after the end of a stream"
        slots = b"".join(each.slots for each in said)
        refs = np.frombuffer(slots, m.SLOT_REF).reshape(-1, self.model.shards)
        return Answer(refs, said[-1].more if said else None, said[-1].reason if said else "")

    def copied(self, transfer: int, blocks: int, *ranks: int) -> None:
        """These ranks, or all of them, have copied so many leading blocks of a stream."""
        for rank in ranks or range(len(self.workers)):
            self.workers[rank].say(m.BlocksCopied(transfer, blocks))

    def recalled(self, transfer: int) -> None:
        for worker in self.workers:
            worker.say(m.Recalled([transfer]))

    # filling ----------------------------------------------------------------------------------------------------------

    def reserve(self, digests: bytes, *, parent: bytes = b"", epoch: int = 0, depth: int = 0) -> tuple[list[int], Refs]:
        """Lease numbers (0 where refused) and where the shards of those granted lie."""
        self.scheduler.say(m.Reserve(self.number(), epoch, parent, digests, depth=depth))
        self.rig.turns()
        (granted,) = self.scheduler.take(m.Granted)
        return granted.leases, np.frombuffer(granted.slots, m.SLOT_REF).reshape(-1, self.model.shards)

    def spill(self, digests: bytes, *, parent: bytes = b"", epoch: int = 0, word: int = 7) -> int:
        """Reserves, fills and publishes; how many were taken."""
        leases, refs = self.reserve(digests, parent=parent, epoch=epoch)
        granted = [lease for lease in leases if lease]
        for shard, worker in enumerate(self.writers):
            for row in refs:
                for place in range(len(PLACES)):
                    write(worker.slot(row[shard]), place, word)
            worker.say(m.Filled(granted, []))
        self.rig.settle()
        return len(granted)
