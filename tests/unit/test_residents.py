"""What the well keeps in host memory is its policy's choice: the same requests, other policies, other recalls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

import pytest
from deep import at, chain

from lab.rig.members import FakeEngine, Model, Rig
from stepwell.block.state import StateEvent
from stepwell.config.settings import Settings
from stepwell.hierarchy import audit
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.arena.residents import Residents
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, name
from stepwell.testing.dict_tier import DictTier

PROMPTS, BLOCKS, SLABS = 16, 4, 4
"""Twice what host memory holds."""


def serve(rig: Rig, engine: FakeEngine, digests: bytes) -> tuple[int, int]:
    """A request: asked for, recalled, and the rest of it spilled. Blocks found, and those of them that were staged."""
    before = int(rig.hierarchy.stats()["hits_staged"])
    ticket = engine.ask(digests)
    rig.settle()
    hits = len(engine.answer(ticket).refs)
    staged = int(rig.hierarchy.stats()["hits_staged"]) - before
    engine.recalled(engine.recall(ticket))
    if hits < len(digests) // 32:
        rest = digests[32 * hits :]
        leases, _ = engine.reserve(rest, parent=at(digests, hits - 1) if hits else b"")
        for worker in engine.workers:
            worker.say(m.Filled([lease for lease in leases if lease], []))
    rig.settle()
    rig.clock.advance(1.0)
    return hits, staged


def replay(rig: Rig, requests: Iterable[int]) -> Iterator[tuple[int, int]]:
    engine = FakeEngine(rig, Model())
    rig.settle()
    prompts = [chain(BLOCKS, 100 * n) for n in range(PROMPTS)]
    for number in requests:
        yield serve(rig, engine, prompts[number])


def share(rig: Rig, requests: list[int], *, unjudged: int) -> float:
    hits = [found for found, _ in replay(rig, requests)][unjudged:]
    return sum(hits) / (BLOCKS * len(hits))


def cyclic(rounds: int) -> list[int]:
    return [n for _ in range(rounds) for n in range(PROMPTS)]


def test_the_settings_name_all_policies() -> None:
    assert Settings.model_fields["policy"].annotation.__args__ == tuple(POLICIES)  # type: ignore[union-attr]
    assert Settings.model_fields["placement"].annotation.__args__ == tuple(PLACEMENTS)  # type: ignore[union-attr]


def test_the_default_keeps_half_of_what_is_asked_for_in_turns_and_lru_nothing() -> None:
    of = {name: share(Rig(SLABS * SLAB, seed=1, policy=name), cyclic(8), unjudged=PROMPTS) for name in POLICIES}
    print(of)
    assert of["lru"] == 0
    assert of["auto"] >= 0.4
    assert len(set(of.values())) > 2, "policies differ in what is recalled"


def test_the_default_keeps_what_is_asked_for_often() -> None:
    dice = Random(7)
    requests = dice.choices(range(PROMPTS), [1 / (n + 1) for n in range(PROMPTS)], k=300)
    of = {name: share(Rig(SLABS * SLAB, seed=1, policy=name), requests, unjudged=60) for name in ("lru", "auto")}
    print(of)
    assert of["auto"] >= of["lru"] > 0.3


def deep(**how: str) -> Rig:
    return Rig(SLABS * SLAB, seed=1, tiers=lambda executor: (DictTier(1 << 30, executor),), **how)  # type: ignore[arg-type]


def test_placement_says_what_is_found_in_host_memory() -> None:
    """A few prompts are used twice, then many once: with a tier below all is found again, and it differs where."""
    twice, once = list(range(4)), list(range(4, PROMPTS))
    staged = {}
    for placement in PLACEMENTS:
        found = list(replay(deep(policy="second_touch", placement=placement), [*twice, *twice, *once, *twice]))[-4:]
        assert all(hits == BLOCKS for hits, _ in found), placement
        staged[placement] = sum(blocks for _, blocks in found)
    assert staged == {"by_worth": 0, "hot": 4 * BLOCKS, "warm": 4 * BLOCKS}


def test_what_is_only_on_its_way_down_never_stays() -> None:
    found = list(replay(deep(placement="warm"), [0, 0, *range(1, PROMPTS), 0, 0, *range(1, PROMPTS), 0]))
    assert found[1] == (BLOCKS, 0), "nobody else needs its place"
    assert found[-1] == (BLOCKS, BLOCKS)


def test_what_is_not_let_in_passes_through_to_the_tier_or_is_refused() -> None:
    shallow, below = Rig(SLABS * SLAB, seed=1, policy="second_touch"), deep(policy="second_touch")
    for rig in (shallow, below):
        list(replay(rig, range(PROMPTS)))
        audit.hierarchy(rig.hierarchy)
    assert shallow.hierarchy.stats()["spills_refused_not_worth_it"] == BLOCKS * PROMPTS
    assert len(below.tiers[0].blocks) == BLOCKS * PROMPTS  # type: ignore[attr-defined]


def test_what_follows_a_refused_block_is_refused_too() -> None:
    rig = Rig(SLABS * SLAB, seed=1, policy="second_touch")
    engine, digests = FakeEngine(rig, Model()), chain(BLOCKS)
    rig.settle()
    assert engine.reserve(at(digests, 0))[0] == [0]
    assert engine.reserve(at(digests, 1), parent=at(digests, 0))[0] == [0]
    assert (
        rig.hierarchy.stats()["spills_refused_not_worth_it"] == rig.hierarchy.stats()["spills_refused_no_parent"] == 1
    )
    assert engine.reserve(at(digests, 1), parent=at(digests, 0))[0] == [0], "asked for twice, and useless alone"
    assert [lease > 0 for lease in engine.reserve(digests)[0]] == [True, True, False, False]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.hierarchy.arena.residents.MAX_REMEMBERED", 20)
    rig = Rig(SLAB, seed=1, policy="auto")
    list(replay(rig, cyclic(6)))
    (holding,) = rig.hierarchy.arena.holdings.values()
    residents: Residents = holding.residents
    assert len(residents._histories) <= 20 + 8
    audit.hierarchy(rig.hierarchy)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_up_unasked_is_known_to_its_policy(policy: str) -> None:
    """As a probe or a guess brings it: remembered, and not asked for since."""
    residents = Residents(POLICIES[policy](), 8)
    entries = [resident(residents, n, asked=float(n + 1)) for n in range(4)]
    for entry in entries:
        entry.change(StateEvent.GONE)
        residents.leave(entry)
    again = [resident(residents, n) for n in (0, 1)]
    assert residents.next() in again
    assert set(residents.few(8)) <= set(again)
    for entry in again:
        residents.leave(entry)
    assert residents.next() is None


def resident(residents: Residents, n: int, asked: float = 0.0) -> Entry:
    id = name(n)
    if asked:
        residents.asked([(id, 0, 1.0)], asked)
    entry = Entry(id, (), None)
    residents.enter(entry, 10.0, passing=False)
    entry.change(StateEvent.LAND)
    residents.offer(entry)
    return entry
