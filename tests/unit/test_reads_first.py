"""Reads go before writes: what a tier is asked to write at a time leaves it free soon enough for the next read."""

from __future__ import annotations

from pathlib import Path

from deep import HEALTHY, HUNG, DeepRig, chain, fill, written

from lab.rig.members import FakeEngine
from stepwell.hierarchy.levels.level import CALM_S
from stepwell.hierarchy.levels.writes import AHEAD_S, NEAR_S, WRITERS
from stepwell.io.files import SystemFiles
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.testing.tier_kit import AnyKeys, Hands
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk.tier import DiskTier, Site


def writes_that_take(rig: DeepRig, seconds: float) -> FakeEngine:
    """An engine of the rig, whose tier has written a few blocks, each alone and in this time."""
    engine = rig.join()
    for n in range(3):
        rig.faulty.faults = HUNG
        fill(engine, chain(1, 1000 + n))
        rig.clock.advance(seconds)
        rig.faulty.faults = HEALTHY
        rig.faulty.release()
        rig.settle()
    rig.faulty.faults = HUNG
    return engine


def test_a_tier_is_asked_to_write_what_it_writes_in_a_moment() -> None:
    """Else a read would wait as long as a slow tier takes for four large batches."""
    rig = DeepRig(4)
    engine = writes_that_take(rig, 0.75 * AHEAD_S)
    fill(engine, chain(12))
    assert [len(batch) for batch in rig.level.writes.writing.values()] == [1, 1], "the second ends behind the moment"
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert len(rig.below.blocks) == 15


def test_while_reads_come_now_and_then_little_is_written_at_a_time() -> None:
    rig = written(6, 4)
    engine = writes_that_take(rig, 0.75 * NEAR_S)
    fill(engine, chain(12, 100), at_once=1)
    assert len(rig.level.writes.writing) == WRITERS, "nothing was read yet"
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    assert engine.found(chain(4)) == 4
    rig.faulty.faults = HUNG
    fill(engine, chain(12, 200), at_once=1)
    assert [len(batch) for batch in rig.level.writes.writing.values()] == [1, 1]
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    rig.clock.advance(CALM_S)
    rig.faulty.faults = HUNG
    fill(engine, chain(12, 300), at_once=1)
    assert len(rig.level.writes.writing) == WRITERS, "no read came for a while"


def test_reads_without_end_leave_writes_their_turn() -> None:
    rig = written(4, 4)
    engine = rig.join()
    rig.faulty.read = lambda blocks, done: None  # type: ignore[method-assign]
    engine.ask(chain(4))
    rig.settle(check=False)
    fill(engine, chain(8, 100))
    rig.settle(check=False)
    assert rig.level.reads.reading
    assert len(rig.below.blocks) == 12


def test_reads_of_the_disk_wait_for_no_thread_that_writes(tmp_path: Path) -> None:
    others, readers = SeededExecutor(1), SeededExecutor(2)
    site = Site(SystemFiles(tmp_path), 64 << 20, 0)
    tier = DiskTier([site], others, SetClock(), lambda: 1_800_000_000.0, AnyKeys(), readers=readers)
    tier.recover(lambda n: None)
    others.drain()
    writing, reading = Hands(tier, others, 128 * 4096), Hands(tier, readers, 128 * 4096)
    assert writing.write(1) == [Writing.STORED]
    tier.write([writing.outgoing(2)], lambda answers: None)
    (found,) = reading.read(1)
    assert not isinstance(found, Reading), "it was read"
    assert others.pending, "and the write has not begun"
    others.drain()
    tier.close()
