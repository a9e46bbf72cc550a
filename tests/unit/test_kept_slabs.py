"""Slabs whose pages an engine's process keeps in memory, as a GPU's driver does, after the well has given them back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deep import chain

from lab.rig.members import FakeEngine, FakeMember, Model, Rig
from stepwell import events as e
from stepwell.events import Event
from stepwell.hierarchy import audit
from stepwell.hierarchy.arena.retired import KEPT_S
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOTS

PINS = Model(pins=True)
OTHER = Model(weights=b"x" * 32)


def full(model: Model = PINS, slabs: int = 2) -> tuple[Rig, FakeEngine]:
    """A host tier of so many slabs, all of which this engine has."""
    rig = Rig(slabs * SLAB, seed=1)
    engine = FakeEngine(rig, model)
    rig.settle()
    for n in range(slabs):
        engine.spill(chain(SLOTS // model.world, 100 * n))
    assert rig.hierarchy.slabs.bytes == slabs * SLAB
    return rig, engine


def heir(rig: Rig, model: Model = OTHER) -> FakeEngine:
    """An engine of another model, which needs a slab."""
    engine = FakeEngine(rig, model, name="heir")
    rig.settle()
    return engine


def kept(rig: Rig) -> int:
    audit.hierarchy(rig.hierarchy)
    assert rig.resident_bytes <= rig.hierarchy.limits.host_bytes
    return int(rig.hierarchy.stats()["kept_bytes"])


def hang(engine: FakeEngine) -> None:
    for worker in engine.workers:
        worker.hangs = True


def test_a_retired_slab_counts_until_all_that_pin_have_unmapped_it() -> None:
    rig, engine = full(replace(PINS, world=2))
    hang(engine)
    other = heir(rig)
    assert kept(rig) == SLAB and not other.workers[0].shared
    for worker in engine.workers:
        assert kept(rig) == SLAB
        worker.hangs = False
        assert worker.unmap() == 1
    rig.settle()
    assert kept(rig) == 0 and other.workers[0].shared, "it has got one of its own"
    assert other.spill(chain(3, 900)) == 3


def test_who_does_not_pin_is_not_waited_for() -> None:
    rig, engine = full(Model())
    assert heir(rig).workers[0].shared
    assert kept(rig) == 0
    assert len(engine.workers[0].take(m.SlabRetired)) == 1


def test_who_has_not_mapped_it_yet_may_keep_it_all_the_same() -> None:
    rig, engine = full()
    late = FakeEngine(rig, PINS, name="late")
    assert late.workers[0].unmapped and late.workers[0].kept
    late.workers[0].unmapped.clear()  # it is still at it
    hang(late)
    other = heir(rig)
    assert engine.workers[0].kept < late.workers[0].kept
    assert kept(rig) == SLAB and not other.workers[0].shared
    late.workers[0].hangs = False
    rig.settle()
    assert kept(rig) == 0 and other.workers[0].shared


@pytest.mark.parametrize("how", ["exits", "acknowledges"])
def test_the_end_of_a_connection_frees_nothing(how: str) -> None:
    """Neither of a slab that was retired before, nor of one that is retired afterwards."""
    rig, engine = full()
    hang(engine)
    other = heir(rig)
    (worker,) = engine.workers
    worker.leave()
    assert worker.member is not None and rig.hierarchy.watches(worker.member)
    rig.clock.advance(1e9)
    other.ask(chain(1, 5))
    rig.settle()
    assert kept(rig) == SLAB and not other.workers[0].shared
    if how == "exits":
        worker.exit()
    else:
        worker.kept.clear()
        FakeMember(rig, engine.worker_hello(0, [engine.session]))
    rig.settle()
    assert kept(rig) == 0 and other.workers[0].shared
    assert not rig.hierarchy.watches(worker.member)


def test_a_lost_process_keeps_what_was_not_retired_yet() -> None:
    rig, engine = full()
    engine.workers[0].leave()
    other = heir(rig)
    assert kept(rig) == SLAB and not other.workers[0].shared
    engine.workers[0].exit()
    rig.settle()
    assert kept(rig) == 0 and other.workers[0].shared


def test_each_rank_speaks_for_itself() -> None:
    rig, engine = full(replace(PINS, world=2))
    hang(engine)
    heir(rig)
    session = engine.session
    engine.scheduler.leave()
    FakeMember(rig, engine.worker_hello(0, [session]))
    engine.workers[0].kept.clear()
    assert kept(rig) == SLAB
    FakeMember(rig, FakeEngine(rig, replace(PINS, world=2), name="stranger").worker_hello(1, [session]))
    assert kept(rig) == SLAB, "another engine has no say"
    FakeMember(rig, engine.worker_hello(1, [session]))
    engine.workers[1].kept.clear()
    assert kept(rig) == 0


def test_who_unmaps_nothing_gets_no_more_to_keep_and_holds_nobody_up() -> None:
    """The well evicts within what it has, says once which bytes do not come back, and takes room elsewhere."""
    said: list[Event] = []
    rig, engine = full(slabs=3)
    rig.hierarchy._sink = said.append
    hang(engine)
    plain = Model(weights=b"y" * 32)
    rig.clock.advance(1.0)
    other = heir(rig)
    for n in range(3):  # in time: it is waited for, and nothing else is retired
        other.reserve(chain(1, 300 + n))
        rig.settle()
    assert kept(rig) == SLAB and rig.hierarchy.slabs.count()["slabs"] == 2
    rig.clock.advance(KEPT_S)
    for n in range(3):
        other.reserve(chain(1, 400 + n))
        rig.settle()
    assert kept(rig) == SLAB and rig.hierarchy.slabs.count()["slabs"] == 2, "it would keep the others as well"
    told = [event.error for event in said if isinstance(event, e.ArenaTroubled)]
    assert len(told) == 1 and "SW-207" in told[0]
    assert engine.spill(chain(SLOTS, 700)) == SLOTS, "it goes on within the rest"
    engine.workers[0].hangs = False
    rig.settle()
    assert kept(rig) == 0 and other.workers[0].shared
    rig.clock.advance(1.0)
    assert other.spill(chain(3, 900)) == 3
    hang(engine)
    third = FakeEngine(rig, plain, name="third")
    rig.settle()
    assert kept(rig) == SLAB and not third.workers[0].shared
    rig.clock.advance(KEPT_S)
    third.reserve(chain(1, 800))
    rig.settle()
    assert third.workers[0].shared and not other.found(chain(3, 900)), "the room of one that pins nothing"
    assert kept(rig) == SLAB


def test_a_slab_that_is_not_retired_is_not_unmapped() -> None:
    rig, engine = full()
    engine.workers[0].say(m.Unmapped(77))
    assert engine.live, "it may be gone by now"
    (slab, _) = engine.workers[0].kept
    engine.workers[0].say(m.Unmapped(slab))
    assert not engine.live
    assert [refused.code for refused in engine.workers[0].take(m.Refused)] == ["SW-804"]
    assert rig.resident_bytes == 2 * SLAB
