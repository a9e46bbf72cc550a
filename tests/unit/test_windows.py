"""What a recall displaces: blocks that only pass through take the place of few others, and pins leave slots."""

from __future__ import annotations

import pytest
from deep import DeepRig, chain, fill, written
from test_streams import asked, heal, nothing_held, through, whole, window

from lab.rig.members import FakeEngine, Model, Rig
from stepwell.hierarchy.core import Options
from stepwell.hierarchy.requests.pins import AT_LEAST
from stepwell.policies.placement.warm import Warm
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOT, SLOTS

LONG = 4 * SLOTS


def hot(rig: DeepRig, engine: FakeEngine, blocks: int) -> list[bytes]:
    """Blocks without prefixes of each other that are in host memory and used often."""
    digests = [chain(1, 500 + n) for n in range(blocks)]
    fill(engine, b"".join(digests))
    rig.settle()
    for _ in range(4):
        rig.clock.advance(1.0)
        assert [engine.found(digest) for digest in digests] == [1] * blocks
    return digests


def left(rig: DeepRig, engine: FakeEngine, digests: list[bytes]) -> int:
    """How many of these are still in host memory."""
    return sum(rig.name(engine, digest) in rig.hierarchy.index for digest in digests)


def streamed(rig: DeepRig, engine: FakeEngine, blocks: int) -> None:
    """All of a chain of so many comes as a stream."""
    transfer = engine.stream(asked(engine, chain(blocks)))
    heal(rig)
    assert whole(engine, transfer) == list(range(100, 100 + blocks))
    assert nothing_held(rig)


def test_a_long_stream_leaves_others_what_they_keep() -> None:
    rig = written(2, LONG)
    engine = rig.join()
    kept = hot(rig, engine, 6)
    streamed(rig, engine, LONG)
    assert left(rig, engine, kept) == 6


def test_the_head_of_a_long_stream_stays() -> None:
    """As much as may be pinned beside what the tier is asked for at a time."""
    rig = written(5, 6 * SLOTS)
    engine = rig.join()
    head = 5 * SLOTS // 2 - rig.level.reads.in_flight // SLOT
    streamed(rig, engine, 6 * SLOTS)
    read = rig.stat("hits_staged")
    assert engine.found(chain(head)) == head > 0 and rig.stat("hits_staged") == read


def test_a_long_stream_goes_through_host_memory_that_others_fill() -> None:
    """It displaces a window, which all of it passes through."""
    rig = written(2, LONG)
    engine = rig.join()
    kept = hot(rig, engine, 2 * SLOTS)
    streamed(rig, engine, LONG)
    assert left(rig, engine, kept) == 2 * SLOTS - SLOTS // 2


@pytest.mark.parametrize("blocks", [SLOTS, LONG])
def test_what_is_not_worth_a_place_takes_a_window_of_them(blocks: int) -> None:
    """No more than what keeps the tier busy, of small host memory half of what may be pinned."""
    rig = written(2, blocks)
    engine = rig.join()
    kept = hot(rig, engine, 2 * SLOTS)
    rig.hierarchy.follow(Options(placement=Warm()))
    streamed(rig, engine, blocks)
    assert left(rig, engine, kept) == 2 * SLOTS - SLOTS // 2


def test_what_is_not_worth_a_place_is_recalled_together_nevertheless() -> None:
    rig = written(2, SLOTS)
    engine = rig.join()
    hot(rig, engine, 2 * SLOTS)
    rig.hierarchy.follow(Options(placement=Warm()))
    assert engine.found(chain(SLOTS)) == SLOTS


def test_pins_are_bounded_by_the_slots_of_their_model() -> None:
    """A stream goes on while a later request has pinned what it may, though host memory has slots of another model."""
    rig = written(2, 2 * SLOTS, digests=chain(SLOTS) + chain(SLOTS, 500))
    engine = rig.join()
    rig.join(Model(weights=b"x" * 32), name="other")
    assert [len(slabs.slabs) for slabs in rig.hierarchy.arena.holdings.values()] == [1, 1]
    waiting = engine.ask(chain(SLOTS), order=2)
    rig.settle()
    assert (len(engine.answer(waiting).refs), engine.answer(waiting).reason) == (SLOTS - AT_LEAST, "pins")
    transfer = engine.stream(asked(engine, chain(SLOTS, 500), order=1))
    heal(rig)
    assert whole(engine, transfer) == list(range(100 + SLOTS, 100 + 2 * SLOTS))
    assert len(engine.answer(waiting).refs) == SLOTS - AT_LEAST


def test_an_oldest_stream_finds_slots_that_are_kept_for_what_another_one_holds() -> None:
    """An engine has the first blocks of a run already: in host memory they are there for those behind them alone."""
    rig = written(1, 2 * SLOTS, digests=chain(SLOTS) + chain(SLOTS, 500))
    engine = rig.join()
    window(rig, SLOTS)
    ticket = engine.ask(chain(SLOTS), order=1)
    rig.settle()
    assert len(engine.answer(ticket).refs) == SLOTS - AT_LEAST
    first = engine.stream(engine.ask(chain(SLOTS, 500), order=2))
    rig.settle()
    second = engine.stream(ticket, SLOTS - 3)
    rig.settle()
    words: list[int] = []
    assert through(engine, first, words) and len(words) == AT_LEAST
    rig.settle()
    assert rig.stat("pinned_bytes") >= 3 * SLOT
    while through(engine, first, words):
        pass
    assert words == list(range(100 + SLOTS, 100 + 2 * SLOTS))
    engine.recalled(first)
    assert whole(engine, second) == list(range(100 + SLOTS - 3, 100 + SLOTS))


def test_what_no_slots_are_left_for_waits_for_a_slab_that_is_being_made() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = FakeEngine(rig, Model())
    rig.settle()
    assert rig.hierarchy.stats()["free_slots"] == 2 * SLOTS
    leases, _ = engine.reserve(chain(2 * SLOTS))
    engine.workers[0].say(m.Filled(leases, []))
    ticket = engine.ask(chain(2 * SLOTS))
    rig.turns()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).reason) == (2 * SLOTS - AT_LEAST, "mapping")
    rig.settle()
    assert len(engine.answer(ticket).refs) == 2 * SLOTS
