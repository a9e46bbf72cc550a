"""A hierarchy with a tier below its arena that tests can look into, break, and hand on to a next life."""

from __future__ import annotations

import random

import numpy as np

from lab.rig.members import PLACES, FakeEngine, Model, Refs, Rig, read, write
from stepwell.block.digest import Chain
from stepwell.block.layout import PAGE
from stepwell.block.namespace import BlockId
from stepwell.io.executor import Executor
from stepwell.policies.writing.base import WritePolicy
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB
from stepwell.testing.dict_tier import DictTier, Kept
from stepwell.testing.remote_tier import RemoteTier, Store
from stepwell.tiers.base import Tier
from stepwell.tiers.faulty import FaultySharedTier, FaultyTier, TierFaults
from stepwell.vault.keyring import Keyring

HUNG = TierFaults(hang=1.0)
HEALTHY = TierFaults()
PLAIN = Model()
TWO = Model(world=2)
PAYLOAD = PAGE + 4096
"""A byte of a frame's payload."""


def chain(blocks: int, start: int = 0) -> bytes:
    made = Chain(1)
    made.extend(range(start, start + blocks))
    return made.digests


def at(digests: bytes, n: int) -> bytes:
    return digests[32 * n : 32 * n + 32]


class DeepRig(Rig):
    """`below` is the tier as it is, `faulty` the one that the hierarchy sees, and `level` its place there. `asked` are
    the ids of blocks that were read from it, call by call. With a `store` there is a second level, a tier that others
    share: `remote` as it is, and `far` as the hierarchy sees it."""

    def __init__(
        self,
        slabs: int = 2,
        *,
        left: DeepRig | None = None,
        limit: int = 1 << 30,
        keyring: Keyring | None = None,
        queue_bytes: int = 256 << 20,
        sealed: bool = True,
        write: WritePolicy | None = None,
        prefetch: bool = False,
        store: Store | None = None,
    ) -> None:
        seed = random.randrange(1 << 32)
        print("seed", seed)
        self.asked: list[list[BlockId]] = []

        def tiers(executor: Executor) -> tuple[Tier, ...]:
            self.below = DictTier(limit, executor, left.below.blocks if left is not None else None)
            self.faulty = FaultyTier(self.below, seed)
            inner = self.below.read

            def noted(blocks, done):  # type: ignore[no-untyped-def]
                self.asked.append([block.id for block in blocks])
                inner(blocks, done)

            self.below.read = noted  # type: ignore[method-assign]
            if store is None:
                return (self.faulty,)
            self.remote = RemoteTier(limit, executor, store)
            self.far = FaultySharedTier(self.remote, seed + 1)
            return (self.faulty, self.far)

        keys = keyring or (left.keyring if left is not None else None)
        super().__init__(
            slabs * SLAB,
            seed=seed,
            keyring=keys,
            tiers=tiers,
            queue_bytes=queue_bytes,
            sealed=sealed,
            write=write,
            prefetch=prefetch,
        )
        self.level = self.hierarchy.stack.levels[0]
        for level in self.hierarchy.stack.levels:
            level.reads._ended = 16  # as if it had been read before: it is asked for all that it may be asked for
        self.hierarchy.recover()
        self.executor.drain()

    def next_life(self, slabs: int = 2, **changes) -> DeepRig:  # type: ignore[no-untyped-def]
        """Another well over what this one wrote."""
        return DeepRig(slabs, left=self, **changes)

    def join(self, model: Model = PLAIN, name: str = "engine") -> FakeEngine:
        engine = FakeEngine(self, model, name=name)
        self.settle()
        return engine

    def stat(self, name: str) -> int:
        return int(self.hierarchy.stats().get(name, 0))

    def name(self, engine: FakeEngine, digest: bytes, epoch: int = 0) -> BlockId:
        """The id of a block in the newest key epoch."""
        assert engine.scheduler.member is not None
        return engine.scheduler.member.session.origins(epoch)[0].name(digest)

    def damage(self, id: BlockId, byte: int) -> None:
        """Flips a bit of what lies in the tier."""
        kept = self.below.blocks[id]
        frames = bytearray(kept.frames)
        frames[byte] ^= 1
        self.below.blocks[id] = Kept(bytes(frames), kept.segment)

    def plaintext(self, word: int) -> bool:
        """A shard with this word lies anywhere in shared memory."""
        return any(
            read(slab.payload(slot), place) == word
            for slab in self.hierarchy.slabs.slabs.values()
            for slot in range(slab.layout.slots)
            for place in range(len(PLACES))
        )


def fill(
    engine: FakeEngine, digests: bytes, *, word: int = 100, epoch: int = 0, parent: bytes = b"", at_once: int = 4
) -> None:
    """Spills so many blocks at a time; block n of all is filled with word + n."""
    for first in range(0, len(digests) // 32, at_once):
        piece = digests[32 * first : 32 * (first + at_once)]
        engine.scheduler.say(m.Reserve(engine.number(), epoch, parent, piece))
        engine.rig.settle()  # perhaps it waits for a slab
        (granted,) = engine.scheduler.take(m.Granted)
        leases, refs = granted.leases, np.frombuffer(granted.slots, m.SLOT_REF).reshape(-1, engine.model.shards)
        assert all(leases)
        for n, row in enumerate(refs):
            for shard, worker in enumerate(engine.writers):
                for place in range(len(PLACES)):
                    write(worker.slot(row[shard]), place, word + first + n)
        for worker in engine.writers:
            worker.say(m.Filled(leases, []))
        parent = piece[-32:]


def told(engine: FakeEngine, refs: Refs) -> list[int]:
    """The words of these blocks as each rank reads them; every place of every shard must agree."""
    words = []
    for row in refs:
        seen = {
            read(worker.slot(row[rank // engine.model.replicas]), place)
            for rank, worker in enumerate(engine.workers)
            for place in range(len(PLACES))
        }
        assert len(seen) == 1, seen
        assert all(worker.holds(row[rank // engine.model.replicas]) for rank, worker in enumerate(engine.workers))
        words += seen
    return words


def written(slabs: int = 2, blocks: int = 6, *, digests: bytes = b"", word: int = 100, **rig) -> DeepRig:  # type: ignore[no-untyped-def]
    """A new life over a tier with a chain of blocks in it, and nothing in the arena."""
    first = DeepRig(-(-blocks // 8) + 1)
    fill(first.join(), digests or chain(blocks), word=word)
    first.settle()
    assert len(first.below.blocks) == blocks
    return first.next_life(slabs, **rig)
