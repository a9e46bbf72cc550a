"""The whole hierarchy against a perfect model: engines that come, copy in small steps, lose their connection and die,
over small tiers that fail, hang and lie, and outlive the well.

The model remembers which bytes were spilled under which identity. Whatever the order of messages, jobs, completions and
copies: nothing is told that was not published under exactly that identity, a leased copy is bit for bit what was
spilled, an unleased one is that or fails its generation check, books balance after every step, every request is
answered or waits for a reason that the model sees too, and at the end nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lab.rig.members import PLACES, FakeEngine, FakeMember, Model, Rig, read, write
from lab.rig.suite.amount import some_or_many
from stepwell.block.digest import Chain
from stepwell.block.layout import MiB
from stepwell.block.namespace import BlockId
from stepwell.hierarchy import audit
from stepwell.hierarchy.levels.breaker import LONGEST_PAUSE_S
from stepwell.hierarchy.requests import pins
from stepwell.hierarchy.sessions import session as requests
from stepwell.io.executor import Executor
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOTS
from stepwell.testing.dict_tier import DictTier, Kept
from stepwell.testing.executor import JobFaults
from stepwell.testing.remote_tier import RemoteTier, Store
from stepwell.tiers.base import Tier
from stepwell.tiers.faulty import FaultySharedTier, FaultyTier, TierFaults
from stepwell.vault.keyring import Keyring

MODELS = [Model(), Model(world=2, pins=True), Model(weights=b"x" * 32, pins=True),
          Model(weights=b"y" * 32, shard_bytes=3 * MiB), Model(),
          Model(weights=b"z" * 32, world=4, replicas=2, pins=True)]  # fmt: skip
TENANTS = ["default", "default", "default", "default", "other", "default"]
"""By model. One is the first one in the hands of another tenant: the same digests, and nothing in common."""

KINDS = [0, 0, 0, 1, 1, 2, 3, 4, 5]
BLOCKS = 10

Identity = tuple[int, int, bytes]
"""Index into MODELS and TENANTS, weights epoch, digest."""

Place = tuple[int, int, int]
"""Slab, slot, generation."""


_RARELY = st.sampled_from([False, False, False, True])


def _chains() -> list[bytes]:
    """Three prompts; the second shares four blocks with the first."""
    made = []
    for tokens in (range(BLOCKS), [*range(4), *range(50, 50 + BLOCKS - 4)], range(100, 100 + BLOCKS)):
        chain = Chain(1)
        chain.extend(list(tokens))
        made.append(chain.digests)
    return made


CHAINS = _chains()
AT_ONCE, NAMED = pins.AT_ONCE, requests.NAMED


def _word(nonce: int, shard: int, place: int) -> int:
    return (nonce << 8) + (shard << 4) + place + 1


@dataclass(eq=False)
class Fill:
    """A lease: `nonce` stands for the bytes of this one fill, so that an older fill of the same block is told apart."""

    identity: Identity
    lease: int
    row: np.ndarray[Any, Any]
    nonce: int
    written: set[int] = field(default_factory=set)
    dropped: bool = False
    decided: bool = False


@dataclass(eq=False)
class Copy:
    """One rank's copy of a shard under way, place by place. `fill`: a spill. `leased`: nothing may change under this
    recall. `nonces`: what may have been spilled there, more than one where the block came up from the tier."""

    member: FakeMember
    ref: Any
    shard: int
    nonces: set[int]
    fill: Fill | None = None
    transfer: int = 0
    leased: bool = False
    place: int = 0
    seen: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    digests: bytes
    epoch: int
    rows: list[np.ndarray[Any, Any]] = field(default_factory=list)
    more: bool | None = None
    reason: str = ""


class Engine(FakeEngine):
    """What the model knows of one session. `before` are earlier sessions of the same processes."""

    def __init__(self, rig: Rig, kind: int, name: str, before: list[Engine]) -> None:
        self.kind = kind
        self.before = before
        self.requests: dict[int, Request] = {}
        self.reserving: dict[int, tuple[int, bytes]] = {}
        self.looks: dict[int, tuple[int, bytes]] = {}
        self.fills: list[Fill] = []
        self.dead: set[int] = set()  # ranks whose process has exited
        acknowledges = [e.session for e in before]
        super().__init__(rig, MODELS[kind], name=name, acknowledges=acknowledges, tenant=TENANTS[kind])


class Well(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """What the examples have reached, so that a model that proves nothing is noticed."""

    @initialize(seed=st.integers(0, 2**32 - 1), eighths=st.integers(12, 32))
    def start(self, seed: int, eighths: int) -> None:
        self.keyring = Keyring.ephemeral(dict.fromkeys(TENANTS))
        self.seed = seed
        self.eighths = eighths
        self.spilled: dict[Identity, set[int]] = {}  # nonces of everything that was published
        self.published: set[Identity] = set()
        self.forgotten: set[Identity] = set()
        self.nonces = 0
        self.store: Store = {}  # of the remote tier, if there is one
        self.vanished: Store = {}  # what others have deleted from it
        self.open({})
        pins.AT_ONCE = requests.NAMED = 1 + seed % 2 * SLOTS  # every second well takes and lets go of one at a time
        self.engines: list[Engine] = []

    def open(self, left: dict[BlockId, Kept]) -> None:
        """A life of the well. Every fourth has no tier; else it holds four to eleven of the smallest blocks. Of those
        that have one, every second has a remote one below it, which outlives this well as others' tier."""

        def tiers(executor: Executor) -> tuple[Tier, ...]:
            if self.seed % 4 == 3:
                return ()
            self.below = DictTier((4 + self.seed % 8) * (2 * MiB + 8192), executor, left)
            self.faulty = FaultyTier(self.below, self.seed)
            self.tiers = [self.faulty]
            if self.seed % 8 < 4:
                remote = RemoteTier((8 + self.seed % 8) * (2 * MiB + 8192), executor, self.store)
                self.tiers.append(FaultySharedTier(remote, self.seed + 1))
            return tuple(self.tiers)

        self.rig = Rig(
            self.eighths * SLAB // 8, seed=self.seed, keyring=self.keyring, tiers=tiers,
            queue_bytes=self.seed % 3 * 4 * MiB, sealed=self.seed % 5 == 0,
            policy=sorted(POLICIES)[self.seed // 4 % len(POLICIES)],
            placement=sorted(PLACEMENTS)[self.seed // 3 % len(PLACEMENTS)],
        )  # fmt: skip
        self.rig.hierarchy.recover()
        self.engines = []
        self.copies: list[Copy] = []
        self.fills: dict[Place, tuple[Fill, int]] = {}
        self.told: list[tuple[Engine, Any, int]] = []  # references that some process may still use

    @property
    def deep(self) -> bool:
        return hasattr(self, "faulty")

    # engines come and go ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.live]

    @property
    def lost(self) -> list[Engine]:
        """Sessions that have ended, with processes that still run."""
        joined_again = {id(old) for engine in self.engines for old in engine.before}
        return [
            e for e in self.engines if not e.live and id(e) not in joined_again and len(e.dead) < e.model.world
        ]  # fmt: skip

    @precondition(lambda self: len(self.live) < 3 and len(self.engines) < 12)
    @rule(kind=st.sampled_from(KINDS))
    def join(self, kind: int) -> None:
        self.engines.append(Engine(self.rig, kind, f"engine {len(self.engines)}", []))

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), member=st.integers(0, 9), really=_RARELY)
    def lose(self, k: int, member: int, really: bool) -> None:
        """A connection ends; its processes go on copying for a while."""
        if not really:
            return
        engine = self.live[k % len(self.live)]
        engine.members[member % len(engine.members)].leave()
        self.seen["lost"] += 1

    @precondition(lambda self: self.engines)
    @rule(k=st.integers(0, 99), rank=st.integers(0, 3), really=_RARELY)
    def exit(self, k: int, rank: int, really: bool) -> None:
        if not really:
            return
        engine = self.engines[k % len(self.engines)]
        self._exit(engine, rank % engine.model.world)

    def _exit(self, engine: Engine, rank: int) -> None:
        """A process ends: its copies stop, then all its connections are seen to end."""
        family = [e for e in self.engines if e.name == engine.name]
        members = [e.workers[rank] for e in family]
        self.copies = [copy for copy in self.copies if copy.member not in members]
        for relative in family:
            relative.dead.add(rank)
            relative.workers[rank].exit()

    @precondition(lambda self: self.lost)
    @rule(k=st.integers(0, 99))
    def rejoin(self, k: int) -> None:
        """Once its copies have stopped, the engine joins again and says so."""
        engine = self.lost[k % len(self.lost)]
        if engine.dead:
            return
        before = [*engine.before, engine]
        members = {id(worker) for old in before for worker in old.workers}
        self.copies = [copy for copy in self.copies if id(copy.member) not in members]
        self.told = [told for told in self.told if told[0] not in before]
        for worker in (worker for old in before for worker in old.workers):
            worker.kept.clear()
        self.engines.append(Engine(self.rig, engine.kind, engine.name, before))
        self.seen["rejoined"] += 1

    # spills ----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), first=st.sampled_from([0, 0, 0, 1, 4, 7]), n=st.integers(1, 8),
          epoch=st.sampled_from([0, 0, 0, 5]))  # fmt: skip
    def reserve(self, k: int, chain: int, first: int, n: int, epoch: int) -> None:
        engine, digests = self.live[k % len(self.live)], CHAINS[chain]
        number, blocks = engine.number(), digests[32 * first : 32 * (first + n)]
        engine.reserving[number] = (epoch, blocks)
        parent = digests[32 * first - 32 : 32 * first]
        engine.scheduler.say(m.Reserve(number, epoch, parent, blocks))

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), n=st.integers(3, BLOCKS), finish=st.booleans())
    def spill(self, k: int, chain: int, n: int, finish: bool) -> None:
        """Without a pause, so that there is something to recall and to evict, or (half of a fill) to lose."""
        engine = self.live[k % len(self.live)]
        self.reserve(self.live.index(engine), chain, 0, n, 0)
        self.rig.settle()
        self.listen()
        for fill in engine.fills:
            self._begin(engine, fill)
        while mine := [c for c in self.copies if c.fill is not None and c.fill in engine.fills]:
            for copy in mine:
                self._step(copy)
            if not finish:
                return

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), member=st.integers(0, 9), really=_RARELY)
    def lose_while_writing(self, k: int, chain: int, member: int, really: bool) -> None:
        if really:
            engine = self.live[k % len(self.live)]
            self.spill(self.live.index(engine), chain, BLOCKS, False)
            engine.members[member % len(engine.members)].leave()

    @precondition(lambda self: any(not f.decided for e in self.live for f in e.fills))
    @rule(k=st.integers(0, 99), start=st.integers(0, 5))
    def decide(self, k: int, start: int) -> None:
        """A granted lease goes to the workers, or back."""
        waiting = [(e, f) for e in self.live for f in e.fills if not f.decided]
        engine, fill = waiting[k % len(waiting)]
        if start:
            self._begin(engine, fill)
        else:
            engine.fills.remove(fill)
            engine.scheduler.say(m.Abandon([fill.lease]))

    def _begin(self, engine: Engine, fill: Fill) -> None:
        if not fill.decided:
            fill.decided = True
            for shard, worker in enumerate(engine.writers):
                self.copies.append(Copy(worker, fill.row[shard], shard, {fill.nonce}, fill))

    # recalls ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), n=st.integers(1, BLOCKS), order=st.integers(0, 9),
          epoch=st.sampled_from([0, 0, 0, 5]))  # fmt: skip
    def ask(self, k: int, chain: int, n: int, order: int, epoch: int) -> None:
        engine = self.live[k % len(self.live)]
        digests = CHAINS[chain][: 32 * n]
        ticket = engine.ask(digests, epoch=epoch, order=order)
        engine.requests[ticket] = Request(digests, epoch)
        engine.looks[ticket] = (epoch, digests)
        engine.scheduler.say(m.Look(ticket, epoch, digests))

    def _request(self, k: int) -> tuple[Engine, int]:
        open_ = [(engine, ticket) for engine in self.live for ticket in engine.requests]
        return open_[k % len(open_)]

    @precondition(lambda self: any(e.requests for e in self.live))
    @rule(k=st.integers(0, 99), first=st.integers(0, 4), n=st.integers(1, BLOCKS))
    def recall(self, k: int, first: int, n: int) -> None:
        engine, ticket = self._request(k)
        self._recall(engine, ticket, first, n)

    def _recall(self, engine: Engine, ticket: int, first: int, n: int) -> None:
        request = engine.requests.pop(ticket)
        rows = request.rows[first : first + n]
        transfer = engine.recall(ticket, first, len(rows))
        for rank, worker in enumerate(engine.workers):
            shard = rank // engine.model.replicas
            for row in rows:
                fill, _ = self.fills[_place(row[shard])]
                self.copies.append(Copy(worker, row[shard], shard, self._nonces(fill), None, transfer, leased=True))
        if not rows:
            engine.recalled(transfer)

    @precondition(lambda self: self.published and self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), hold=st.booleans())
    def fetch(self, k: int, chain: int, hold: bool) -> None:
        """Asked, answered and recalled (or held) without a pause; the copies take their time."""
        engine = self.live[k % len(self.live)]
        self.ask(self.live.index(engine), chain, BLOCKS, 0, 0)
        self.rig.settle()
        self.listen()
        ticket = max(engine.requests, default=0)
        if ticket and not hold:
            self._recall(engine, ticket, 0, BLOCKS)

    @precondition(lambda self: any(e.requests for e in self.live))
    @rule(k=st.integers(0, 99))
    def release(self, k: int) -> None:
        engine, ticket = self._request(k)
        del engine.requests[ticket]
        engine.release(ticket)

    @precondition(lambda self: self.told)
    @rule(k=st.integers(0, 9999), most=st.integers(1, 4), steps=st.integers(0, 4))
    def copy_late(self, k: int, most: int, steps: int) -> None:
        """Workers were sent off with references whose pins ended with the session, or long ago."""
        for n in range(most):
            engine, ref, shard = self.told[(k + 97 * n) % len(self.told)]
            rank = shard * engine.model.replicas + k % engine.model.replicas
            if rank in engine.dead:
                continue
            fill, _ = self.fills[_place(ref)]
            late = Copy(engine.workers[rank], ref, shard, self._nonces(fill))
            self.copies.append(late)
            for _ in range(steps):
                self._step(late)

    @precondition(lambda self: self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), n=st.integers(1, BLOCKS))
    def forget(self, k: int, chain: int, n: int) -> None:
        engine, digest = self.live[k % len(self.live)], CHAINS[chain][32 * n - 32 : 32 * n]
        self.forgotten.add((engine.kind, 0, digest))
        engine.scheduler.say(m.Forget(0, digest))

    # copies ----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.copies)
    @rule(k=st.integers(0, 9999), steps=st.integers(1, 5))
    def copy(self, k: int, steps: int) -> None:
        copy = self.copies[k % len(self.copies)]
        for _ in range(steps):
            if copy in self.copies:
                self._step(copy)

    @precondition(lambda self: self.copies)
    @rule(k=st.integers(0, 99), steps=st.integers(1, 4))
    def copy_some(self, k: int, steps: int) -> None:
        """Every third copy stands still meanwhile: ranks get out of step, and zombies stay for long."""
        for copy in [copy for copy in self.copies if (min(copy.nonces) + copy.shard) % 3 != k % 3]:
            for _ in range(steps):
                if copy in self.copies:
                    self._step(copy)

    @precondition(lambda self: any(c.fill for c in self.copies))
    @rule(k=st.integers(0, 9999))
    def drop(self, k: int) -> None:
        """A rank gives up its shard."""
        writing = [c for c in self.copies if c.fill]
        copy = writing[k % len(writing)]
        assert copy.fill
        copy.fill.dropped = True
        self._written(copy, copy.fill)

    def _step(self, copy: Copy) -> None:
        slot = copy.member.slot(copy.ref)
        if copy.fill is not None:
            self.seen["zombie writes"] += copy.member.gone
            assert copy.member.holds(copy.ref), "a slot was given away while a process may still write it"
            (nonce,) = copy.nonces
            write(slot, copy.place, _word(nonce, copy.shard, copy.place))
        else:
            copy.seen.append(read(slot, copy.place))
        copy.place += 1
        if copy.place < len(PLACES):
            return
        if copy.fill is not None:
            self._written(copy, copy.fill)
        else:
            self._read(copy)

    def _written(self, copy: Copy, fill: Fill) -> None:
        self.copies.remove(copy)
        engine = next(e for e in self.engines if copy.member in e.workers)
        fill.written.add(copy.shard)
        done, gone = ([], [fill.lease]) if fill.dropped else ([fill.lease], [])
        if len(fill.written) == engine.model.shards and engine.live:
            engine.fills.remove(fill)
            if not fill.dropped:
                self.published.add(fill.identity)
                self.spilled.setdefault(fill.identity, set()).add(fill.nonce)
        copy.member.say(m.Filled(done, gone))

    def _read(self, copy: Copy) -> None:
        self.copies.remove(copy)
        holds = copy.member.holds(copy.ref)
        if holds:
            possible = [[_word(n, copy.shard, place) for place in range(len(PLACES))] for n in copy.nonces]
            assert copy.seen in possible, "a recall is what was spilled"
        assert holds or not copy.leased, "nothing changes under a lease"
        self.seen["verified from below"] += holds and self.fills[_place(copy.ref)][0].lease == 0
        self.seen["verified, leased" if copy.leased else "verified" if holds else "generation changed"] += 1
        if copy.transfer and not any(c.transfer == copy.transfer and c.member is copy.member for c in self.copies):
            copy.member.say(m.Recalled([copy.transfer]))

    def _nonces(self, fill: Fill) -> set[int]:
        """What may lie there: the bytes of this fill, or of any that was published where it came up from the tier."""
        return {fill.nonce} if fill.lease else self.spilled[fill.identity]

    # the tier and the well's lives -----------------------------------------------------------------------------------

    @precondition(lambda self: self.deep)
    @rule(fault=st.sampled_from(["fail", "flip", "swap", "lose", "hang", "hang"]), often=st.booleans())
    def break_tier(self, fault: str, often: bool) -> None:
        self.faulty.faults = TierFaults(**{fault: 1.0 if often else 0.3})

    @precondition(lambda self: self.deep and len(self.tiers) > 1)
    @rule(fault=st.sampled_from(["fail", "flip", "swap", "lose", "hang", "hang"]), often=st.booleans())
    def break_remote(self, fault: str, often: bool) -> None:
        self.tiers[1].faults = TierFaults(**{fault: 1.0 if often else 0.3})

    @precondition(lambda self: self.store)
    @rule(k=st.integers(0, 999), really=_RARELY)
    def vanish(self, k: int, really: bool) -> None:
        """Another well deletes a block of the remote tier."""
        if really:
            id = list(self.store)[k % len(self.store)]
            self.vanished[id] = self.store.pop(id)
            self.forgotten |= self.published
            self.seen["remote: vanished"] += 1

    @precondition(lambda self: self.vanished)
    @rule(k=st.integers(0, 999))
    def appear(self, k: int) -> None:
        """Another well writes a block to the remote tier."""
        id = list(self.vanished)[k % len(self.vanished)]
        self.store[id] = self.vanished.pop(id)
        self.seen["remote: appeared"] += 1

    @precondition(lambda self: self.deep)
    @rule()
    def mend_tier(self) -> None:
        for faulty, name in zip(self.tiers, ("tier", "remote"), strict=False):
            faulty.faults = TierFaults()
            for fault, times in faulty.seen.items():
                self.seen[f"{name}: {fault}"] += times
                faulty.seen[fault] = 0
            faulty.release()

    @precondition(lambda self: self.deep and self.published and self.live)
    @rule(really=_RARELY)
    def outage(self, really: bool) -> None:
        """The tier answers nobody for longer than is waited for it, and everybody asks meanwhile."""
        if not really:
            return
        self.break_tier("hang", True)
        for _ in range(2):
            for k in range(len(self.live)):
                for chain in range(len(CHAINS)):
                    self.ask(k, chain, BLOCKS, 0, 0)
            self.rig.settle()
            self.listen()
            self.wait(0.6)

    @precondition(lambda self: self.deep and self.published and self.live)
    @rule(k=st.integers(0, 99), chain=st.integers(0, 2), really=_RARELY)
    def crowd(self, k: int, chain: int, really: bool) -> None:
        """What is below is asked for while everything in the arena is being filled."""
        if not really:
            return
        for n in range(1, 4):
            self.reserve(k, (chain + n % 2) % len(CHAINS), 0, BLOCKS, 5 * (n > 2))
            self.rig.settle()
            self.listen()
        self.ask(k, chain, BLOCKS, 0, 0)

    @precondition(lambda self: self.deep and len(self.below.blocks) > 1)
    @rule(k=st.integers(0, 999), what=st.sampled_from(["swap", "zeros", "flip", "elsewhere"]), really=_RARELY)
    def tamper(self, k: int, what: str, really: bool) -> None:
        """Somebody was at the files."""
        if not really:
            return
        blocks = self.below.blocks
        one, two = list(blocks)[k % len(blocks)], list(blocks)[k % (len(blocks) - 1)]
        kept = blocks[one]
        match what:
            case "swap":
                same = len(kept.frames) == len(blocks[two].frames)  # its books are by length
                blocks[one], blocks[two] = (blocks[two], kept) if same else (kept, blocks[two])
            case "zeros":
                blocks[one] = Kept(bytes(len(kept.frames)), kept.segment)
            case "flip":
                at = k * 4099 % len(kept.frames)
                blocks[one] = Kept(b"".join((kept.frames[:at], b"x", kept.frames[at + 1 :])), kept.segment)
            case _:
                blocks[one] = Kept(kept.frames, bytes(16))
        self.seen["tampered"] += 1

    @rule(seconds=st.sampled_from([0.01, 0.6]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @precondition(lambda self: self.deep)
    @rule(really=_RARELY)
    def restart(self, really: bool) -> None:
        """The well is killed at this moment, and its engines with it; another one finds what is in the tier."""
        if not really:
            return
        left = dict(self.below.blocks)
        self.end()
        self.seed += 40  # the same kind of well
        self.forgotten |= self.published
        self.open(left)
        self.seen["restarted"] += bool(left)

    # the well's own time ---------------------------------------------------------------------------------------------

    @precondition(lambda self: any(member.unmapped for member in self.rig.members))
    @rule(k=st.integers(0, 99), most=st.integers(1, 2))
    def map(self, k: int, most: int) -> None:
        waiting = [member for member in self.rig.members if member.unmapped]
        waiting[k % len(waiting)].map(most)

    @precondition(lambda self: any(member.retired for member in self.rig.members))
    @rule(k=st.integers(0, 99))
    def unmap(self, k: int) -> None:
        waiting = [member for member in self.rig.members if member.retired]
        waiting[k % len(waiting)].unmap()

    @rule(jobs=st.integers(0, 4), fail=st.sampled_from([0.0, 0.0, 0.0, 0.4]), refuse=_RARELY)
    def tick(self, jobs: int, fail: float, refuse: bool) -> None:
        self.rig.executor.faults = JobFaults(fail=fail)
        self.rig.memory.refuse = refuse
        for _ in range(jobs):
            self.rig.executor.step()
        self.rig.turns()

    @rule()
    def rest(self) -> None:
        """Everything is delivered: each request has its answer, or a reason to wait that we know of."""
        seen: tuple[int, ...] = ()
        while seen != (seen := (sum(len(engine.requests) for engine in self.live), self.seen["waits again"])):
            self.rig.settle()
            self.listen()  # may give way, which is news to the others
        for engine in self.live:
            had_memory = any(member.shared for member in engine.workers)
            assert not engine.looks, "looked and never answered"
            assert had_memory or self.rig.hierarchy.slabs.next_moment, "it has no slab, and waits for none"
            for request in engine.requests.values():
                assert request.more is not None, "asked and never answered"
                if request.more:
                    self._justify(engine, request)

    @property
    def stuck(self) -> bool:
        """Blocks that are to come up do not."""
        return any(tier.hanging for tier in self.tiers) or any(level.down for level in self.rig.hierarchy.stack.levels)

    def _justify(self, engine: Engine, request: Request) -> None:
        told = 32 * len(request.rows)  # and behind them some may be on their way up
        ahead = {request.digests[at : at + 32] for at in range(told, len(request.digests), 32)}
        self.seen[f"waits: {request.reason}"] += 1
        match request.reason:
            case "filling":
                filling = {fill.identity for fill in engine.fills}
                assert any((engine.kind, request.epoch, digest) in filling for digest in ahead)
            case "staging":
                assert self.stuck, "nothing is asked of the tier"
            case "no_room":
                counted = self.rig.hierarchy.arena.count()
                assert counted["filling"] or counted["leased_blocks"] or self.rig.hierarchy.arena.pins
            case "pins" if self.deep and self.stuck:
                entries = [entry for entry in self.rig.hierarchy.arena.entries() if entry.pins]
                assert self._pins_full(
                    engine, {_place(np.frombuffer(e.refs, m.SLOT_REF)[0]): e.nbytes for e in entries}
                )
            case "pins":
                assert self._pins_full(engine, _told((of, held) for of in self.live for held in of.requests.values()))
            case other:
                raise AssertionError(f"no reason to wait: {other}")

    def _pins_full(self, engine: Engine, pinned: dict[Place, int], slabs: int | None = None) -> bool:
        """With one more block of this engine, pins would hold more than half of host memory, or leave fewer slots of
        its model than two blocks have. `pinned`: bytes of each block, by the place of its first shard. `slabs`: how
        many its model may have had; those that it has."""
        hierarchy, model = self.rig.hierarchy, engine.model
        owner = hierarchy.registry.sessions[engine.session].owner
        assert owner is not None
        serving = {slab.number: slab.layout.slots for slab in hierarchy.slabs.serving(owner)}
        slots = sum(list(serving.values())[:slabs])
        own = sum(nbytes for (slab, _, _), nbytes in pinned.items() if slab in serving)
        more = model.shards * model.shard_bytes
        too_many = sum(pinned.values()) + more > 0.5 * hierarchy.limits.host_bytes
        return too_many or own + 3 * more > slots * model.shard_bytes

    # what must always hold -------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.listen()
            audit.hierarchy(self.rig.hierarchy)
            assert self.rig.resident_bytes <= self.rig.hierarchy.limits.host_bytes
            self.seen["kept"] += self.rig.hierarchy.slabs.retired.kept > 0

    def listen(self) -> None:
        """Takes in what the well has said, and believes none of it."""
        for engine in self.engines:
            for granted in engine.scheduler.take(m.Granted):
                self._granted(engine, granted)
            for found in engine.scheduler.take(m.Found):
                self._found(engine, found)
            for seen in engine.scheduler.take(m.Seen):
                epoch, digests = engine.looks.pop(seen.ticket)
                assert len(seen.here) == len(digests) // 32
                for n, here in enumerate(seen.here):
                    known = (engine.kind, epoch, digests[32 * n : 32 * n + 32]) in self.published
                    assert known or not here, "seen, and never published"
                    self.seen[f"looked: {here}"] += 1
            for way in engine.scheduler.take(m.GiveWay):
                self.seen["gave way"] += 1
                if way.ticket not in engine.requests or not engine.live:
                    continue
                if way.ticket % 3 == 0:
                    del engine.requests[way.ticket]
                    engine.release(way.ticket)
                elif way.ticket % 3 == 1:  # the others were offered already
                    self.seen["waits again"] += 1
                    engine.requests[way.ticket] = replace(engine.requests[way.ticket], rows=[], more=None)
                    engine.scheduler.say(m.Release(way.ticket, waits=True))

    def _granted(self, engine: Engine, granted: m.Granted) -> None:
        epoch, blocks = engine.reserving.pop(granted.spill)
        rows = iter(np.frombuffer(granted.slots, m.SLOT_REF).reshape(-1, engine.model.shards))
        for n, lease in enumerate(granted.leases):
            if not lease:
                continue
            row = next(rows)
            self.nonces += 1
            fill = Fill((engine.kind, epoch, blocks[32 * n : 32 * n + 32]), lease, row, self.nonces)
            engine.fills.append(fill)
            for shard, ref in enumerate(row):
                place = _place(ref)
                assert place not in self.fills, "a slot is leased twice under one generation"
                assert all(int(ref["slab"]) in worker.shared for worker in engine.workers)
                self.fills[place] = (fill, shard)

    def _found(self, engine: Engine, found: m.Found) -> None:
        request = engine.requests.get(found.ticket)
        if request is None:
            return
        assert request.more is not False, "a final answer is the last one"
        assert found.start == len(request.rows)
        for row in np.frombuffer(found.slots, m.SLOT_REF).reshape(-1, engine.model.shards):
            at = 32 * len(request.rows)
            wanted = (engine.kind, request.epoch, request.digests[at : at + 32])
            if _place(row[0]) not in self.fills:
                self._came_up(wanted, row)
            for shard, ref in enumerate(row):
                fill, of = self.fills[_place(ref)]
                assert (fill.identity, of) == (wanted, shard)
                assert len(fill.written) == engine.model.shards and not fill.dropped, "told before it was published"
                self.told.append((engine, ref, shard))
            request.rows.append(row)
        for source in found.sources:
            self.seen[f"from level {source}"] += 1
        request.more, request.reason = found.more, found.reason
        if found.more:
            return
        self.seen[f"ends: {found.reason}"] += 1
        at = 32 * len(request.rows)
        identity = (engine.kind, request.epoch, request.digests[at : at + 32])
        match found.reason:
            case "end":
                assert at == len(request.digests)
            case "evicted":
                assert identity in self.published
            case "never_seen":
                assert identity not in self.published or identity in self.forgotten
            case "filling":
                assert not any(fill.identity == identity for fill in engine.fills)
            case "not_readable":
                assert identity in self.published
            case "tier_down":
                assert identity in self.published
            case "no_room":
                pass  # there was none when it was asked
            case "pins":
                own = _told([(engine, request)])
                assert self._pins_full(engine, own, slabs=1), "its own pins are all that there may be"
            case other:
                raise AssertionError(f"no reason to end: {other}")

    def _came_up(self, identity: Identity, row: np.ndarray[Any, Any]) -> None:
        """Slots that nobody was given to fill: what is told of them is from below."""
        assert self.deep
        assert identity in self.published, "told, and never published"
        self.seen["came up"] += 1
        fill = Fill(identity, 0, row, 0, written=set(range(len(row))), decided=True)
        for shard, ref in enumerate(row):
            assert _place(ref) not in self.fills
            self.fills[_place(ref)] = (fill, shard)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            pins.AT_ONCE, requests.NAMED = AT_ONCE, NAMED
            self.end()

    def end(self) -> None:
        """All sessions end, all processes exit, all completions come: nothing is left but blocks."""
        self.rig.executor.faults = JobFaults()
        if self.deep:
            self.mend_tier()
        for engine in self.engines:
            if engine.live:
                engine.scheduler.leave()
            for rank in range(engine.model.world):
                self._exit(engine, rank)
        self.rig.settle()
        hierarchy = self.rig.hierarchy
        self.rig.clock.advance(LONGEST_PAUSE_S)  # what waits to be written is tried again
        self.rig.settle()
        counted = hierarchy.arena.count()
        for what in ("pinned_bytes", "leased_blocks", "quarantined_slots", "filling"):
            assert counted[what] == 0, what
        for level in hierarchy.stack.levels:
            reads, writes = level.reads, level.writes
            assert not (reads.promoting or reads.reading or writes.writing or writes.queued_bytes)
            assert writes.idle
        for what in ("skipped_gone", "skipped_queue_full", "evicted_blocks"):
            self.seen[f"tier: {what}"] += int(hierarchy.stats().get(f"dict_{what}", 0))
        assert (
            not hierarchy.registry.quarantines and not hierarchy.registry.keeping and not hierarchy.slabs.retired.kept
        )
        assert hierarchy.sessions == 0
        for reason in ("evicted", "retired"):
            self.seen[reason] += hierarchy.counters.drops[reason]
        hierarchy.close()
        assert hierarchy.slabs.bytes == 0


def _place(ref: Any) -> Place:
    return int(ref["slab"]), int(ref["slot"]), int(ref["generation"])


def _told(requests: Iterable[tuple[Engine, Request]]) -> dict[Place, int]:
    """Bytes of the blocks that these were told of, by the place of the first shard."""
    return {
        _place(row[0]): engine.model.shards * engine.model.shard_bytes
        for engine, request in requests
        for row in request.rows
    }


@some_or_many("examples", 40, 300)
def test_the_well_against_a_perfect_model(examples: int) -> None:
    """Short walks, which hypothesis makes as short as they can be when one fails."""
    run_state_machine_as_test(
        Well,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            print_blob=True,
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # not explain: minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


_ARGUMENTS: dict[str, Callable[[random.Random], object]] = {
    "k": lambda r: r.randrange(10_000),
    "kind": lambda r: r.choice(KINDS),
    "member": lambda r: r.randrange(10),
    "rank": lambda r: r.randrange(4),
    "really": lambda r: r.random() < 0.2,
    "chain": lambda r: r.randrange(len(CHAINS)),
    "first": lambda r: r.choice([0, 0, 0, 1, 4, 7]),
    "n": lambda r: r.randint(1, BLOCKS),
    "epoch": lambda r: r.choice([0, 0, 0, 5]),
    "order": lambda r: r.randrange(10),
    "start": lambda r: r.randrange(6),
    "steps": lambda r: r.randint(1, len(PLACES)),
    "most": lambda r: r.randint(1, 4),
    "jobs": lambda r: r.randrange(5),
    "fail": lambda r: r.choice([0.0, 0.0, 0.0, 0.4]),
    "refuse": lambda r: r.random() < 0.2,
    "finish": lambda r: r.random() < 0.7,
    "hold": lambda r: r.random() < 0.3,
    "fault": lambda r: r.choice(["fail", "flip", "swap", "lose", "hang", "hang"]),
    "often": lambda r: r.random() < 0.5,
    "what": lambda r: r.choice(["swap", "zeros", "flip", "elsewhere"]),
    "seconds": lambda r: r.choice([0.01, 0.6]),
}


def walk() -> None:
    """The same rules drawn evenly, further than hypothesis goes."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    well = Well()
    well.start(seed, draw.randint(12, 32))
    rules = [rule for rule in well.rules if rule.function.__name__ != "join"]
    for step in range(400):
        if step % 40 == 0 and len(well.live) < 3:
            well.join(draw.choice(KINDS))
        able = [rule for rule in rules if all(holds(well) for holds in rule.preconditions)]
        chosen = draw.choice(able)
        chosen.function(well, **{name: _ARGUMENTS[name](draw) for name in chosen.arguments})
        well.books_balance()
    well.teardown()


def test_long_walks() -> None:
    for _ in range(5):
        walk()


@pytest.mark.nightly
def test_long_walks_reach_what_the_model_is_there_for() -> None:
    """At least 24 walks, and up to 400 until the rarest of it was seen."""
    reached = ("verified, leased", "verified", "generation changed", "zombie writes", "evicted", "retired", "kept",
               "rejoined", "waits: pins", "waits: filling", "ends: evicted", "restarted", "came up",
               "verified from below", "waits: staging", "waits: no_room", "ends: not_readable", "ends: tier_down",
               "tier: fail", "tier: flip", "tampered", "tier: lose", "tier: hang", "tier: skipped_gone",
               "tier: evicted_blocks", "remote: fail", "remote: hang", "remote: vanished", "remote: appeared",
               "from level 1", "from level 2", "waits again", "looked: 0", "looked: 1")  # fmt: skip
    Well.seen.clear()
    for number in range(400):
        if number >= 24 and all(Well.seen[what] for what in reached):
            break
        walk()
    print(dict(Well.seen))
    assert all(Well.seen[what] for what in reached), f"the walks do not reach enough: {Well.seen}"
