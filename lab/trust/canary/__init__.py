"""Canaries: engines of the same weights never alarm each other, and other weights under the same name always do.

Fake engines over a real hierarchy and real shared memory: blocks of bfloat16, made of weights, tokens and each engine's
own rounding, are spilled by one engine and computed once more by another, which compares them as a worker does and
tells the well. Full scale adds a real vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lab.rig.members import FakeEngine, Model, Rig
from lab.trust.budget import Budget
from lab.trust.canary import engine
from lab.trust.report import Row
from stepwell.engines.paged.compare import relative_error
from stepwell.hierarchy import audit
from stepwell.hierarchy.sessions.canaries import KNOWN
from stepwell.protocol import messages as m

LAYERS = 4
SHARD = 1 << 15
KIND = "bfloat16"
ROUNDING = 0.01
"""At most, of each number, relative to its layer's size. Two engines then differ by up to 0.014; 0.008 was the most
that a vLLM on a CPU has shown."""

SIZES = np.geomspace(0.5, 20, 2 * LAYERS, dtype=np.float32)[:, None]
"""Of the layers' numbers, which differ as a model's do."""

PROMPTS = 24
EVIDENCE = 8

Floats = npt.NDArray[np.float32]


def run(budget: Budget) -> Iterable[Row]:
    yield _clean(budget)
    yield _others(budget)
    yield from engine.run(budget)


@dataclass
class Computing:
    """An engine with a model: `weights` are what it computes with, whatever its namespace says. `changed`: of layer
    `layer`, the share of its KV that is another model's; of all layers where that is None."""

    engine: FakeEngine
    weights: int
    dice: random.Random
    changed: float = 0.0
    layer: int | None = None
    _known: dict[int, Floats] = field(default_factory=dict)

    def block(self, prompt: int) -> npt.NDArray[np.uint8]:
        """Its KV of a prompt of one block: the layers' K and V one behind the other, rounded anew each time."""
        kv = self._known.get(prompt)
        if kv is None:
            kv = _model(self.weights, prompt)
            layers = slice(None) if self.layer is None else slice(2 * self.layer, 2 * self.layer + 2)
            kv[layers] += self.changed * _model(self.weights + 1_000_003, prompt)[layers]
            self._known[prompt] = kv
        noise = np.random.default_rng(self.dice.randrange(1 << 63)).standard_normal(kv.shape, np.float32)
        rounded = kv + np.float32(ROUNDING * self.dice.random()) * noise * SIZES
        return (rounded.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)

    def spill(self, prompt: int) -> bool:
        leases, refs = self.engine.reserve(_digest(prompt))
        worker = self.engine.workers[0]
        for row in refs:
            worker.slot(row[0])[:SHARD] = self.block(prompt)
        worker.say(m.Filled([lease for lease in leases if lease], []))
        self.engine.rig.turns()
        return any(leases)

    def canary(self, prompt: int) -> bool:
        """Computes a stored block once more and tells the well; False: nothing was offered."""
        ticket = self.engine.ask(_digest(prompt))
        self.engine.rig.turns()
        refs = self.engine.answer(ticket).refs
        if not len(refs):
            self.engine.release(ticket)
            return False
        transfer = self.engine.number()
        self.engine.scheduler.say(m.Recall(ticket, transfer, 0, 1, True))
        worker = self.engine.workers[0]
        stored, fresh = worker.slot(refs[0][0])[:SHARD].reshape(2 * LAYERS, -1), self.block(prompt)
        pairs = zip(fresh.reshape(2 * LAYERS, -1), stored, strict=True)
        errors = [relative_error(a, b, KIND) for a, b in pairs]
        self.engine.recalled(transfer)
        self.engine.scheduler.say(m.Canary(0, KIND, errors))
        self.engine.rig.turns()
        return True


def _model(weights: int, prompt: int) -> Floats:
    values = np.random.default_rng([weights, prompt]).standard_normal((2 * LAYERS, SHARD // 4 // LAYERS), np.float32)
    return values * SIZES


def _digest(prompt: int) -> bytes:
    return prompt.to_bytes(32, "big")


def _rig(seed: int) -> Rig:
    return Rig(64 << 20, seed=seed)


def _engine(rig: Rig, name: str) -> FakeEngine:
    engine = FakeEngine(rig, Model(shard_bytes=SHARD), name=name)
    rig.settle()
    return engine


def _clean(budget: Budget) -> Row:
    """Two engines of one model, one namespace; a case is a canary. A violation is a mismatch, or a request that was
    told nothing of a block that is there."""
    wanted, cases = budget.of(ci=6_000, full=500_000), 0
    evidence: list[str] = []
    for number, dice in _dice(budget, "clean"):
        if cases >= wanted:
            break
        rig = _rig(dice.randrange(1 << 32))
        one, two = (Computing(_engine(rig, name), number, dice) for name in ("one", "two"))
        for prompt in range(PROMPTS):
            one.spill(prompt)
        for _ in range(min(5 * KNOWN, wanted - cases)):
            cases += 1
            if not two.canary(dice.randrange(PROMPTS)):
                evidence.append(f"clean/{number}: a block was not offered after {cases} canaries")
                break
            if budget.over:
                break
        stats = rig.hierarchy.stats()
        wrong = int(stats.get("canaries_mismatched", 0)) + int(stats["quarantined_namespaces"])
        evidence += [f"clean/{number}: {wrong} false alarms"] * wrong
        audit.hierarchy(rig.hierarchy)
        budget.tell(f"{cases:,} of {wanted:,} clean canaries, {len(evidence)} violations")
    remark = "canaries of engines of the same weights; rounding drawn, bfloat16"
    return Row("clean canaries raise no alarm", cases, len(evidence), budget.seed, remark, evidence[:EVIDENCE])


def _others(budget: Budget) -> Row:
    """One namespace that an engine of other weights joins; a case is a namespace. It must be in quarantine after the
    second canary, empty, and closed for both engines."""
    wanted, cases = budget.of(ci=100, full=5_000), 0
    evidence: list[str] = []
    for number, dice in _dice(budget, "others"):
        if cases >= wanted or budget.over:
            break
        cases += 1
        rig = _rig(dice.randrange(1 << 32))
        one = Computing(_engine(rig, "one"), number, dice)
        for prompt in range(PROMPTS):
            one.spill(prompt)
        calibrated = number % 10 == 0
        for _ in range(KNOWN if calibrated else dice.randrange(3)):
            one.canary(dice.randrange(PROMPTS))
        # What a fine-tuning changes is seen once the bound is known; before that, what is another model in a layer.
        changed = dice.uniform(0.15, 0.5) if calibrated else dice.uniform(0.5, 1.5)
        layer = dice.choice((None, dice.randrange(LAYERS)))
        two = Computing(_engine(rig, "two"), number, dice, changed, layer)
        needed = next((n for n in range(1, 4) if two.canary(dice.randrange(PROMPTS)) and _barred(rig)), 0)
        rig.settle()
        stats = rig.hierarchy.stats()
        closed = not one.canary(0) and not one.spill(0) and not two.spill(0)
        if needed != 2 or stats["blocks"] or not closed:
            what = f"in quarantine after {needed or 'more than 3'} canaries, {stats['blocks']} blocks left"
            evidence.append(f"others/{number}: {changed:.2f} of layer {layer}: {what}, closed: {closed}")
        audit.hierarchy(rig.hierarchy)
        if cases % 20 == 0:
            budget.tell(f"{cases:,} of {wanted:,} namespaces with other weights, {len(evidence)} violations")
    remark = "namespaces that other weights join; at the second canary, and nothing is recalled from them then"
    return Row("other weights trip it", cases, len(evidence), budget.seed, remark, evidence[:EVIDENCE])


def _barred(rig: Rig) -> bool:
    return bool(rig.hierarchy.stats()["quarantined_namespaces"])


def _dice(budget: Budget, name: str) -> Iterator[tuple[int, random.Random]]:
    number = 0
    while True:
        yield number, budget.dice("canary", name, number)
        number += 1
