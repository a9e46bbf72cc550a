"""The end of a well with blocks that wait to be written: its own loop, threads and files, and a disk that is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deep import chain
from wells import MIB, PATIENCE, InThread, eventually

from lab.rig.members import FakeEngine, Rig
from stepwell.hierarchy.levels.breaker import FAILURES, FIRST_PAUSE_S, Verdict
from stepwell.io.files import SystemFile

BLOCKS = 4
QUIET_S = 0.05


class Owned(Rig):
    """A well whose loop has ended, and whose state machine is ours now: with its own clock, memory and threads."""

    def __init__(self, folder: Path) -> None:
        (folder / "well.sock").unlink(missing_ok=True)  # of an earlier one
        self.well = InThread(folder, disk_bytes=64 * MIB)
        self.well.loop.stop("the test takes over")
        self.well.wakeup.wake()
        self.well.thread.join(PATIENCE)
        self.hierarchy = self.well.hierarchy
        self.members = []

    def settle(self) -> None:
        """Until nothing has happened for a while: a job may hang."""
        quiet = time.monotonic() + QUIET_S
        while time.monotonic() < quiet:
            happened = self.well.loop._complete(time.monotonic() + 1)
            happened |= self.hierarchy.turn()
            happened |= any([member.map() for member in self.members if not member.gone])  # noqa: C419 - map them all
            if happened:
                quiet = time.monotonic() + QUIET_S
            time.sleep(0.001)

    def joined(self) -> FakeEngine:
        """An engine that has a slab to fill."""
        engine, deadline = FakeEngine(self), time.monotonic() + PATIENCE
        while not engine.workers[0].shared and time.monotonic() < deadline:
            self.settle()
        self.settle()
        return engine

    def queued(self) -> int:
        return self.hierarchy.stack.levels[0].writes.queued_bytes


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes of files wait until it is set."""
    gate, write = threading.Event(), SystemFile.write

    def gated(file: SystemFile, *args: object) -> None:
        gate.wait(PATIENCE)
        write(file, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SystemFile, "write", gated)
    yield gate
    gate.set()


def test_what_waits_to_be_written_is_written_before_the_end(tmp_path: Path, gate: threading.Event) -> None:
    rig = Owned(tmp_path)
    rig.joined().spill(chain(BLOCKS))
    assert rig.queued() > 0
    later = threading.Timer(0.2, gate.set)
    later.start()
    assert rig.well.loop.drain(PATIENCE)
    later.join()
    rig.well.close()
    again = Owned(tmp_path)
    engine = again.joined()
    eventually(lambda: engine.found(chain(BLOCKS)) == BLOCKS)  # reads of a busy machine take longer than it is quiet
    again.well.close()


def test_a_disk_that_hangs_is_not_waited_for_beyond_the_limit(tmp_path: Path, gate: threading.Event) -> None:
    rig = Owned(tmp_path)
    rig.joined().spill(chain(BLOCKS))
    assert rig.queued() > 0
    assert not rig.well.loop.drain(0.1)
    gate.set()
    rig.well.close()


def test_a_well_that_ends_writes_when_a_tier_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    """Time alone lets a breaker admit one more write."""
    rig = Owned(tmp_path)
    engine = rig.joined()
    breaker = rig.hierarchy.stack.levels[0]._writes_breaker
    for call in range(FAILURES):
        breaker.began(-call)
        breaker.ended(-call, Verdict.FAILED)
    engine.spill(chain(BLOCKS))
    assert rig.queued() > 0
    assert rig.well.loop.drain(FIRST_PAUSE_S + PATIENCE / 2)
    rig.well.close()
