"""Spills of a prefix that is larger than host memory: its head stays, what is behind that passes through, each block
until it is written."""

from __future__ import annotations

from unittest.mock import patch

from deep import DeepRig, chain, fill

from lab.rig.members import FakeEngine
from stepwell.hierarchy.saved import PauseRecord
from stepwell.hierarchy.work import ROOM_WAIT_S
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT, SLOTS


def under_way() -> tuple[DeepRig, FakeEngine, bytes]:
    """A prefix fills host memory, and the next block of it waits: as much as may be is being written."""
    rig = DeepRig(1, queue_bytes=SLOT)
    engine, digests = rig.join(), chain(2 * SLOTS)
    fill(engine, digests[: 32 * SLOTS], at_once=2)
    rig.settle()
    leases, _ = engine.reserve(block(digests, SLOTS), parent=block(digests, SLOTS - 1))
    assert all(leases)
    engine.workers[0].say(m.Filled(leases, []))
    rig.turns()
    engine.scheduler.say(m.Reserve(engine.number(), 0, block(digests, SLOTS), block(digests, SLOTS + 1)))
    rig.turns()
    assert not engine.scheduler.take(m.Granted)
    return rig, engine, digests


def block(digests: bytes, at: int) -> bytes:
    return digests[32 * at : 32 * at + 32]


def test_the_head_stays_and_the_rest_passes() -> None:
    rig = DeepRig(2, queue_bytes=SLOT)
    engine, digests = rig.join(), chain(6 * SLOTS)
    fill(engine, digests, at_once=2)
    rig.settle()
    assert len(rig.below.blocks) == 6 * SLOTS and rig.stat("spills_refused_no_room") == 0
    held = [rig.name(engine, block(digests, n)) in rig.hierarchy.index for n in range(6 * SLOTS)]
    assert held.index(False) >= SLOTS, "the head"


def test_a_spill_waits_for_what_is_written() -> None:
    rig, engine, _ = under_way()
    rig.settle()
    (granted,) = engine.scheduler.take(m.Granted)
    assert all(granted.leases)


def test_what_passes_is_not_displaced_before_it_is_written() -> None:
    rig = DeepRig(1, queue_bytes=SLOT)
    engine, digests = rig.join(), chain(2 * SLOTS)
    fill(engine, digests[: 32 * SLOTS], at_once=2)
    rig.settle()
    leases, _ = engine.reserve(digests[32 * SLOTS : 32 * SLOTS + 64], parent=block(digests, SLOTS - 1))
    with patch.object(rig.level.writes, "begin"):  # the tier is asked for nothing yet
        engine.workers[0].say(m.Filled(leases, []))
        rig.turns()
        others, _ = engine.reserve(chain(2, 500))
    assert all(leases) and all(others)
    rig.level.writes.stale = True
    rig.settle()
    assert all(rig.name(engine, block(digests, n)) in rig.below.blocks for n in range(SLOTS + 2))


def test_a_spill_does_not_wait_for_ever() -> None:
    rig, engine, _ = under_way()
    rig.clock.advance(ROOM_WAIT_S)
    rig.turns()
    (granted,) = engine.scheduler.take(m.Granted)
    assert granted.leases == [0] and granted.reason == "no_room"


def test_a_block_that_came_meanwhile_is_not_filled_twice() -> None:
    rig, engine, digests = under_way()
    engine.scheduler.say(m.Reserve(engine.number(), 0, block(digests, SLOTS), block(digests, SLOTS + 1)))
    rig.settle()
    granted = engine.scheduler.take(m.Granted)
    assert [all(each.leases) for each in granted] == [True, False]


def test_a_spill_that_waits_for_room_is_refused_when_spills_are_paused() -> None:
    rig, engine, _ = under_way()
    rig.hierarchy.operator.pause(PauseRecord("spills", 1.8e9, 1000, "a test"))
    rig.settle()
    (granted,) = engine.scheduler.take(m.Granted)
    assert granted.leases == [0] and granted.reason == "paused"
