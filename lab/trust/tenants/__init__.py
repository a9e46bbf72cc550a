"""Tenants never meet: not by a hit, not by an id, not by memory, and not by how long an answer takes.

`interleavings` puts several tenants with the very same model and prompts through one hierarchy, in random order, over
a tier that outlives it, and compares every byte; `strangers` does so with a real well, whose tenants come in by sockets
(and, for root, as other users), and takes the times of their probes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from random import Random

import numpy as np

from lab.rig.members import FakeEngine, FakeMember, Model, Refs, Rig
from lab.trust.budget import Budget
from lab.trust.report import Row
from lab.trust.tenants import strangers
from stepwell.block.layout import MiB
from stepwell.block.namespace import BlockId
from stepwell.io.executor import Executor
from stepwell.protocol import messages as m
from stepwell.protocol import wire
from stepwell.testing.dict_tier import DictTier, Kept
from stepwell.tiers.base import Tier
from stepwell.vault.keyring import Keyring

NAMES = ("default", "a", "b", "c")
_PROMPTS, _BLOCKS = 3, 4
_STEPS = 10
_SHARD = 64 << 10
_SLAB = 16 * MiB
_LIVES = 100  # interleavings between two deaths of the well
_EVIDENCE = 5
_FLOODS = 0.005  # so often an operation is of an engine that floods the well


def run(budget: Budget) -> Iterable[Row]:
    yield interleavings(budget, NAMES)
    yield from strangers.run(budget)


def interleavings(budget: Budget, tenants: Iterable[str]) -> Row:
    """`tenants`: of the engines, one each. Twice the same is no case of the promise, but shows that the check sees."""
    cases, wanted, found = 0, budget.of(ci=10_000, full=100_000), 0
    compared = from_tier = moved = 0
    evidence: list[str] = []
    keyring = Keyring.ephemeral(NAMES)
    left: dict[BlockId, Kept] = {}
    spilled: Spilled = {}
    for life in count():
        if cases >= wanted or budget.over:
            break
        with_dice = budget.dice("tenants", "interleavings", life)
        well = _Well(with_dice, keyring, left, tuple(tenants), spilled)
        for number in range(min(_LIVES, wanted - cases)):
            well.interleave()
            cases += 1
            for wrong in well.wrong:
                found += 1
                evidence.append(f"life {life}, interleaving {number}: {wrong}")
            well.wrong.clear()
            if budget.over:
                break
        left = well.end()
        compared, from_tier, moved = compared + well.compared, from_tier + well.from_tier, moved + well.moved
        if life % 20 == 0:
            budget.tell(f"{cases} interleavings of tenants, {found} crossed")
    remark = f"interleavings of {_STEPS} operations of {len(NAMES)} tenants with one model and the same prompts;"
    remark += f" {compared:,} blocks compared, {from_tier:,} read from the tier, {moved:,} slabs taken from an owner"
    return Row(
        "no block, byte, slab or id of one tenant reaches another", cases, found, budget.seed, remark,
        evidence[:_EVIDENCE],
    )  # fmt: skip


Spilled = dict[tuple[int, bytes], set[int]]
"""By place of a tenant and digest: the words of all fills of it."""


class _Listened:
    """A member's connection; what it carries to the member is added to `said`."""

    def __init__(self, member: FakeMember, said: list[bytes]) -> None:
        self._said = said
        self._send = member.send
        self.sever = member.sever

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        self._said.append(wire.frame(message))
        self._send(message, fds)


class _Engine(FakeEngine):
    def __init__(self, rig: Rig, place: int, tenant: str) -> None:
        self.place = place
        self.said: list[bytes] = []  # everything that this tenant was told, as it crosses the socket
        super().__init__(rig, Model(shard_bytes=_SHARD), name="engine", tenant=tenant)
        for member in self.members:
            self._listen(member)

    def _listen(self, member: FakeMember) -> None:
        self.said += [wire.frame(message) for message in member.inbox]
        assert member.member is not None
        member.member.channel = _Listened(member, self.said)


class _Well:
    """One life of a well and of an engine of each tenant."""

    def __init__(
        self, dice: Random, keyring: Keyring, left: dict[BlockId, Kept], tenants: tuple[str, ...], spilled: Spilled
    ) -> None:
        self.wrong: list[str] = []
        self._dice = dice
        self._spilled = spilled
        self._chains = [bytes([1 + n // 256, n % 256]) * 16 for n in range(_PROMPTS * _BLOCKS)]
        self.compared = self.from_tier = self.moved = 0
        self._words = count(1 + max((max(words) for words in spilled.values()), default=0))

        def tiers(executor: Executor) -> tuple[Tier, ...]:
            self._below = DictTier(24 * (_SHARD + 8192), executor, left)
            return (self._below,)

        slabs = dice.randint(len(tenants) - 1, len(tenants) + 2)  # one for each, or so few that they go round
        self._rig = Rig(
            slabs * _SLAB, seed=dice.randrange(1 << 32), keyring=keyring, tiers=tiers, tenants=len(set(tenants))
        )
        self._rig.hierarchy.recover()
        self._tenants = tenants
        self._engines = [_Engine(self._rig, place, tenant) for place, tenant in enumerate(tenants)]
        self._rig.settle(check=False)

    def interleave(self) -> None:
        for _ in range(_STEPS):
            engine = self._dice.choice(self._engines)
            prompt, blocks = self._dice.randrange(_PROMPTS), self._dice.randint(1, _BLOCKS)
            digests = b"".join(self._chains[prompt * _BLOCKS :][:blocks])
            acts = (self._spill, self._fetch, self._fetch, self._fetch, self._forget, self._again)
            act = self._flood if self._dice.random() < _FLOODS else self._dice.choice(acts)
            act(engine, digests)
        self._look_over()

    # what tenants do --------------------------------------------------------------------------------------------------

    def _spill(self, engine: _Engine, digests: bytes) -> None:
        engine.scheduler.say(m.Reserve(engine.number(), 0, b"", digests))
        self._rig.settle(check=False)
        if not (answers := engine.scheduler.take(m.Granted)):  # it waits for a slab, for a while
            self._rig.clock.advance(1.0)
            self._rig.settle(check=False)
            answers = engine.scheduler.take(m.Granted)
        leases = answers[0].leases
        granted = [at for at, lease in enumerate(leases) if lease]
        for at, row in zip(granted, np.frombuffer(answers[0].slots, m.SLOT_REF).reshape(-1, 1), strict=True):
            word = next(self._words)
            engine.workers[0].slot(row[0]).view(np.uint64)[:] = word
            self._spilled.setdefault((engine.place, digests[32 * at :][:32]), set()).add(word)
        engine.workers[0].say(m.Filled([leases[at] for at in granted], []))
        if self._dice.random() < 0.5:
            self._rig.settle(check=False)

    def _fetch(self, engine: _Engine, digests: bytes) -> None:
        ticket = engine.ask(digests)
        self._rig.settle(check=False)
        self._compare(engine, digests, engine.answer(ticket).refs)
        engine.release(ticket)

    def _compare(self, engine: _Engine, digests: bytes, refs: Refs) -> None:
        self.compared += len(refs)
        for at, row in enumerate(refs):
            mine = self._spilled.get((engine.place, digests[32 * at :][:32]), set())
            slab = self._rig.hierarchy.slabs.slabs[int(row[0]["slab"])]
            if slab.number not in engine.workers[0].shared:
                self.wrong.append(f"{engine.tenant} was told of a slab that it does not have")
                continue
            slot = engine.workers[0].slot(row[0]).view(np.uint64)
            word = int(slot[0])
            if word not in mine or not (slot == word).all():
                self.wrong.append(f"{engine.tenant} was given {word}, and has spilled {sorted(mine)[-3:]} there")

    def _forget(self, engine: _Engine, digests: bytes) -> None:
        engine.scheduler.say(m.Forget(0, digests[-32:]))

    def _again(self, engine: _Engine, _: bytes) -> None:
        """The engine is killed, and another one of the same name and tenant comes."""
        if self._dice.random() < 0.3:
            for member in engine.members:
                member.exit()
            self._engines[engine.place] = _Engine(self._rig, engine.place, engine.tenant)

    def _flood(self, engine: _Engine, digests: bytes) -> None:
        """It says as much as it may at once, or more, of what nobody knows and of what takes room; then it is gone. The
        others go on beside it, and the books, of what waits too, must balance."""
        numbers = [self._dice.randrange(1 << 20)] * self._dice.choice((m.MAX_LISTED, m.MAX_LISTED + 1))
        for _ in range(30):
            engine.scheduler.say(m.Ask(engine.number(), 0, 0, digests * 100))
            engine.scheduler.say(m.Reserve(engine.number(), 0, b"", digests * 32))
        engine.scheduler.say(m.Forget(0, digests * 100))
        engine.workers[0].say(self._dice.choice((m.Filled(numbers, numbers), m.Recalled(numbers))))
        engine.scheduler.say(m.Abandon(numbers))
        if engine.live and len(numbers) > m.MAX_LISTED:
            self.wrong.append(f"{engine.tenant} was listened to, and said what no engine says")
        if self._dice.random() < 0.5:
            self._rig.settle()
        for member in engine.members:
            member.exit()
        self._engines[engine.place] = _Engine(self._rig, engine.place, engine.tenant)

    # what must hold ---------------------------------------------------------------------------------------------------

    def _look_over(self) -> None:
        """Books, ids, slabs and what was said."""
        self._rig.settle()
        hierarchy = self._rig.hierarchy
        owners = {id: entry.slots[0][0].owner.tenant for id, entry in hierarchy.index.items()}
        for engine in self._engines:
            member = engine.scheduler.member
            assert member is not None
            names = {origin.name(d) for origin in member.session.origins(0) for d in self._chains}
            if any((id in names) != (tenant == engine.tenant) for id, tenant in owners.items()):
                self.wrong.append(f"a block has the id of {engine.tenant} and is not its own, or the other way round")
            said = b"".join(engine.said)
            if any(id[:8] in said for id in owners):
                self.wrong.append(f"{engine.tenant} was told an id")
            mine = {slab.number for slab in hierarchy.slabs.slabs.values() if slab.owner.tenant == engine.tenant}
            if any(slab not in mine for slab in engine.workers[0].shared if slab in hierarchy.slabs.slabs):
                self.wrong.append(f"{engine.tenant} has memory of another tenant")
            engine.said.clear()

    def end(self) -> dict[BlockId, Kept]:
        """The well is killed; what the tier has stays."""
        for engine in self._engines:
            for member in engine.members:
                member.exit()
        self._rig.settle(check=False)
        left = dict(self._below.blocks)
        self.from_tier = self._below.reads
        self.moved = self._rig.hierarchy.counters.total["slabs_retired"]
        self._rig.hierarchy.close()
        return left
