"""KV that ranks hold alike: one shard, which one of them writes and all of them read."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from deep import DeepRig, chain, fill, told

from lab.rig.members import FakeEngine, FakeMember, Model, Rig
from stepwell.hierarchy import audit
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOT, SLOTS

MIXED = Model(world=4, replicas=2)
"""Two shards: ranks 0 and 1 hold the first, 2 and 3 the second."""


@pytest.fixture
def rig() -> Rig:
    return Rig(4 * SLAB, seed=1)


def joined(rig: Rig, model: Model = MIXED, name: str = "engine") -> FakeEngine:
    engine = FakeEngine(rig, model, name=name)
    rig.settle()
    assert engine.live
    return engine


def test_a_block_has_each_shard_once(rig: Rig) -> None:
    engine = joined(rig)
    fill(engine, chain(3), word=40)
    counted = rig.hierarchy.slabs.count() | rig.hierarchy.arena.count()
    assert (counted["blocks"], counted["block_bytes"]) == (3, 3 * 2 * SLOT)
    assert counted["slabs"] * SLOTS - counted["free_slots"] == 3 * 2
    ticket = engine.ask(chain(3))
    rig.settle()
    answer = engine.answer(ticket)
    assert answer.refs.shape == (3, 2) and told(engine, answer.refs) == [40, 41, 42]


def test_it_is_there_when_those_who_write_have_written(rig: Rig) -> None:
    engine = joined(rig)
    leases, _ = engine.reserve(chain(1))
    for rank, blocks in ((1, 0), (3, 0), (0, 0), (2, 1)):
        engine.workers[rank].say(m.Filled(leases, []))
        rig.settle()
        assert rig.hierarchy.arena.sums.blocks == blocks


def test_one_who_does_not_write_gives_nothing_up(rig: Rig) -> None:
    engine = joined(rig)
    leases, _ = engine.reserve(chain(1))
    engine.workers[1].say(m.Filled([], leases))
    engine.workers[0].say(m.Filled(leases, []))
    engine.workers[2].say(m.Filled(leases, []))
    assert rig.hierarchy.arena.sums.blocks == 1


def test_a_recall_ends_when_all_have_read(rig: Rig) -> None:
    engine = joined(rig)
    fill(engine, chain(2))
    ticket = engine.ask(chain(2))
    rig.settle()
    transfer = engine.recall(ticket)
    for worker in engine.workers:
        assert rig.hierarchy.arena.count()["leased_blocks"] == 2
        worker.say(m.Recalled([transfer]))
    assert rig.hierarchy.arena.count()["leased_blocks"] == 0


def test_slots_are_those_that_all_have_mapped(rig: Rig) -> None:
    engine = FakeEngine(rig, MIXED)
    for worker in engine.workers[:3]:
        worker.hangs = True
    rig.turns()
    rig.executor.drain()
    for worker in engine.workers[:3]:
        worker.map()
    engine.scheduler.say(m.Reserve(1, 0, b"", chain(1)))
    rig.turns()
    assert not engine.scheduler.take(m.Granted), "rank 3 is to read them"
    engine.workers[3].map()
    rig.turns()
    (granted,) = engine.scheduler.take(m.Granted)
    assert all(granted.leases)


@pytest.mark.parametrize("lost", range(4))
def test_the_loss_of_a_rank_ends_the_session_and_frees_nothing_that_is_written(rig: Rig, lost: int) -> None:
    engine = joined(rig)
    leases, _ = engine.reserve(chain(2))
    engine.workers[2].say(m.Filled(leases[:1], []))
    engine.workers[lost].leave()
    assert not engine.live
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    audit.hierarchy(rig.hierarchy)
    for worker in engine.workers:
        worker.exit()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 0


def test_it_comes_back_from_below() -> None:
    first = DeepRig(4)
    fill(first.join(MIXED), chain(3), word=40)
    first.settle()
    assert len(first.below.blocks) == 3
    rig = first.next_life(4)
    engine = rig.join(MIXED)
    ticket = engine.ask(chain(3))
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == [40, 41, 42]
    assert rig.join(replace(MIXED, replicas=1), name="other").found(chain(3)) == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_blocks_of_as_many_shards_as_ranks_are_others(rig: Rig, replicas: int) -> None:
    """The engine before this one may have stored what ranks hold alike as often as it is held."""
    engine = joined(rig, Model(world=2, replicas=replicas))
    engine.spill(chain(2))
    other = joined(rig, Model(world=2, replicas=3 - replicas), name="other")
    assert other.found(chain(2)) == 0
    assert other.spill(chain(2)) == 2
    assert joined(rig, Model(world=2, replicas=replicas), name="twin").found(chain(2)) == 2


DISAGREE = {
    "one says so": [{}, {"replicas": 1}, {}, {}],
    "other layouts": [{}, {}, {}, {"layout": b"x" * 32}],
}


@pytest.mark.parametrize("name", DISAGREE)
def test_members_that_disagree_get_no_session(rig: Rig, name: str) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = MIXED, "engine"
    hellos = [msgspec.structs.replace(engine.worker_hello(n), **change) for n, change in enumerate(DISAGREE[name])]
    members = [FakeMember(rig, hello) for hello in (*hellos, engine.scheduler_hello())]
    assert all(member.gone for member in members)
    assert [refused.code for member in members for refused in member.take(m.Refused)] == ["SW-401"] * 5
    assert rig.hierarchy.sessions == 0


def test_shards_may_have_layouts_of_their_own(rig: Rig) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = MIXED, "engine"
    layouts = [b"a" * 32, b"a" * 32, b"b" * 32, b"b" * 32]
    hellos = [msgspec.structs.replace(engine.worker_hello(n), layout=each) for n, each in enumerate(layouts)]
    assert not any(FakeMember(rig, hello).gone for hello in (*hellos, engine.scheduler_hello()))


@pytest.mark.parametrize("replicas", [-1, 0, 2, 4])
def test_replicas_that_make_no_sense_are_refused(rig: Rig, replicas: int) -> None:
    hello = msgspec.structs.replace(joined(rig).scheduler_hello(), world=3, replicas=replicas)
    member = FakeMember(rig, hello)
    assert [refused.code for refused in member.take(m.Refused)] == ["SW-804"]
