"""Power cuts that nobody survives but the disk: what it may hold at this moment is opened by a fresh well, which is
asked for everything that was ever spilled. Each block comes back as it was, or is a miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from lab.sim.disk import Disk
from lab.sim.fibres import Fibres
from lab.sim.files import SimFiles
from lab.sim.life import Surroundings, make_well
from lab.sim.oracle import Oracle, Violation
from lab.sim.setup import EPOCHS, Model
from lab.sim.tails import parts
from lab.sim.trace import Trace
from stepwell.block.layout import SlabLayout
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.hierarchy import audit
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.protocol import messages as m
from stepwell.testing.sparse import SparseMemory

if TYPE_CHECKING:
    from lab.sim.world import World

AT_A_TIME = 8
"""States that are drawn at one moment."""


class Cuts:
    """Opens up to `most` different states in all. `states`: how many it has opened."""

    def __init__(self, world: World, most: int) -> None:
        self.states = 0
        self._world = world
        self._most = most
        self._known: set[int] = set()
        self._changes = -1

    def perhaps(self) -> None:
        """At this moment, if anything was written since the last one."""
        world = self._world
        changes = sum(disk.changes for disk in world.disks)
        if self.states >= self._most or changes == self._changes:
            return
        self._changes = changes
        for _ in range(min(AT_A_TIME, self._most - self.states)):
            disks = [disk.after_power_cut(world.dice) for disk in world.disks]
            self._open(disks)
            if world.dice.random() < 0.1:  # and again, while the first well is at work
                self._open([disk.after_power_cut(world.dice) for disk in disks])

    def _open(self, disks: list[Disk]) -> None:
        known = _fingerprint(disks)
        if known in self._known:
            return
        self._known.add(known)
        self.states += 1
        recall_everything(self._world.around, disks, self._world.oracle, self._world.trace.events)


def _fingerprint(disks: Sequence[Disk]) -> int:
    hasher = xxhash.xxh3_64()
    for disk in disks:
        for name, inode in sorted(disk.names.items()):
            hasher.update(name.encode())
            hasher.update(len(inode.data).to_bytes(8, "big"))
            hasher.update(inode.data)
        hasher.update(b"|")
    return hasher.intdigest()


def recall_everything(around: Surroundings, disks: Sequence[Disk], oracle: Oracle, now: int) -> int:
    """Opens a well on these disks and asks for every block of every prompt, after so many
    events. How many came back. Raises Violation."""
    fibres, memory, trace = Fibres(around.dice), SparseMemory(), Trace()
    fibres.halting = 0.0
    files = [SimFiles(disk, around.dice, fibres, trace, {}) for disk in disks]
    models = around.setup.models
    room = max(SlabLayout(model.shard_bytes, 32).nbytes for model in models)
    hierarchy, _ = make_well(around, files, fibres, memory, _trouble, room)
    hierarchy.recover()
    recalled = 0
    for kind, model in enumerate(models):
        reader = _Reader(hierarchy, fibres, model)
        for epoch in EPOCHS:
            for digests in around.setup.prompts:
                recalled += reader.recall(kind, epoch, digests, oracle, now)
        reader.leave()
    audit.hierarchy(hierarchy)
    hierarchy.close()
    for shared in memory.made:
        shared.close()
    return recalled


def _trouble(kind: str, error: BaseException) -> None:
    if not isinstance(error, OSError | OverflowError):
        raise Violation("books", f"a job raised {error!r} ({kind})") from error


class _Heard:
    """What the well sends to the reader's member number `at`."""

    def __init__(self, reader: _Reader, at: int) -> None:
        self._reader = reader
        self._at = at

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, m.Found):
            self._reader.found.append(message)
        elif isinstance(message, m.SlabShared):
            self._reader.unmapped.append((self._reader.members[self._at], message.slab))

    def sever(self) -> None:
        pass


class _Reader:
    """An engine by hand that only reads, in the well's own memory."""

    def __init__(self, hierarchy: Hierarchy, fibres: Fibres, model: Model) -> None:
        self._hierarchy = hierarchy
        self._fibres = fibres
        self._model = model
        self._tickets = 0
        self.found: list[m.Found] = []
        self.unmapped: list[tuple[Member, int]] = []
        self.members: list[Member] = []
        for rank in range(model.world):
            self._join(
                m.Hello(
                    m.PROTOCOL,
                    "worker",
                    "reader",
                    rank,
                    model.world,
                    model.shard_bytes,
                    b"l" * 32,
                    replicas=model.replicas,
                )
            )
        self._join(
            m.Hello(
                m.PROTOCOL,
                "scheduler",
                "reader",
                0,
                model.world,
                model.shard_bytes,
                b"l" * 32,
                model.weights,
                b"m" * 32,
                16,
                replicas=model.replicas,
            )
        )
        self._settle()

    def _join(self, hello: m.Hello) -> None:
        at = len(self.members)
        member = self._hierarchy.join(Peer(0, at, True, DEFAULT_TENANT), hello, _Heard(self, at))
        if member is None:
            raise Violation("hits", "a reader cannot join")
        self.members.append(member)

    def _settle(self) -> None:
        for _ in range(100_000):
            busy = self._hierarchy.turn()
            busy = self._fibres.step() or busy
            while self.unmapped:
                member, slab = self.unmapped.pop()
                self._hierarchy.handle(member, m.Mapped(slab))
                busy = True
            if not busy:
                return
        raise Violation("books", "the well is never done")

    def recall(self, kind: int, epoch: int, prompt: bytes, oracle: Oracle, now: int) -> int:
        """A run of blocks that are there, the next run behind the first that is not, and so on to the end."""
        at = recalled = 0
        digests, names = parts(self._model, prompt)
        while 32 * at < len(digests):
            rows = self._ask(epoch, digests[32 * at :])
            for n, row in enumerate(rows):
                oracle.judge((kind, epoch, names[at + n]), [self._shard(ref) for ref in row], now)
            recalled += len(rows)
            at += len(rows) + 1
        return recalled

    def _ask(self, epoch: int, digests: bytes) -> np.ndarray[tuple[int, int], np.dtype[np.void]]:
        self._tickets += 1
        self.found.clear()
        self._hierarchy.handle(self.members[-1], m.Ask(self._tickets, epoch, 0, digests))
        self._settle()
        if not self.found or self.found[-1].more:
            raise Violation("late", "a fresh well does not answer")
        self._hierarchy.handle(self.members[-1], m.Release(self._tickets))
        return np.frombuffer(b"".join(f.slots for f in self.found), m.SLOT_REF).reshape(-1, self._model.shards)

    def _shard(self, ref: np.void) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        slab = self._hierarchy.slabs.slabs.get(int(ref["slab"]))
        assert slab is not None
        return slab.payload(int(ref["slot"]))

    def leave(self) -> None:
        for member in self.members:
            self._hierarchy.exited(member)
        self._settle()
