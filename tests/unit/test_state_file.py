"""A home that hangs costs what the next well would have read there, and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wells import PATIENCE, eventually

from stepwell.config import Settings
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.io import whole
from stepwell.io.process.background import Background
from stepwell.serve import process
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.serve.home import state_file
from stepwell.serve.home.calibration import COSTS_NAME, CostList
from stepwell.serve.home.quarantine import QuarantineList
from stepwell.serve.home.state_file import StateWriter
from stepwell.testing.clock import SetClock
from stepwell.vault.keyring import Keyring

TAG = b"a" * 16


class Hung:
    """In place of `whole.replace`: hangs until it is healed. `texts`: what was written `below`, by name; a thread of an
    earlier test may have something to write elsewhere."""

    def __init__(self, below: Path) -> None:
        self.begun, self.healed = threading.Event(), threading.Event()
        self.texts: list[tuple[str, str]] = []
        self._below = below
        self._real = whole.replace

    def replace(self, folder: Path, name: str, text: str) -> None:
        if not folder.is_relative_to(self._below):
            self._real(folder, name, text)
            return
        self.begun.set()
        self.healed.wait()
        self.texts.append((name, text))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hung]:
    hung = Hung(tmp_path)
    monkeypatch.setattr(whole, "replace", hung.replace)
    yield hung
    hung.healed.set()


def ends(call: Callable[[], object]) -> None:
    """It does not wait for what hangs."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_of_each_file_the_newest_content_waits_and_no_other(home: Hung, tmp_path: Path) -> None:
    keeper, quarantine, costs = StateWriter(), QuarantineList(tmp_path), CostList(tmp_path)
    quarantine.keep([(TAG,)], keeper)
    assert home.begun.wait(PATIENCE)
    for number in range(1000):
        ends_with = number.to_bytes(16, "big")
        quarantine.keep([(ends_with,)], keeper)
        costs.keep({}, keeper)
    assert len(keeper._wanted) == 2
    assert not keeper.settle(0.0)
    home.healed.set()
    assert keeper.close(PATIENCE)
    assert sorted(home.texts) == [
        (COSTS_NAME, "{}"),
        ("quarantine.json", f'[["{(999).to_bytes(16, "big").hex()}"]]'),
        ("quarantine.json", f'[["{TAG.hex()}"]]'),
    ]


def test_who_ends_does_not_wait_for_home_longer_than_it_wants_to(home: Hung, tmp_path: Path) -> None:
    keeper = StateWriter()
    CostList(tmp_path).keep({}, keeper)
    assert home.begun.wait(PATIENCE)
    ended: list[bool] = []
    ends(lambda: ended.append(keeper.close(0.01)))
    assert ended == [False]


def test_a_home_that_does_not_answer_is_told(home: Hung, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    keeper = StateWriter(clock.now)
    CostList(tmp_path).keep({}, keeper)
    assert home.begun.wait(PATIENCE)
    CostList(tmp_path).keep({}, keeper)
    assert not caplog.text
    clock.advance(state_file._LATE_SECONDS)
    CostList(tmp_path).keep({}, keeper)
    assert "home does not answer, a write to it has taken 10 s: the next well will learn" in caplog.text


def test_a_well_whose_home_hangs_makes_slabs_and_ends(
    home: Hung, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `serve.process` but its loop and signals: in their place both files are written again and again."""
    worked: list[bool] = []

    def loop(hierarchy: Hierarchy, gates: Any, clock: Any, executors: list[ThreadExecutor], wakeup: Wakeup, **_: Any):  # type: ignore[no-untyped-def]
        def run() -> str:
            for number in range(20):
                hierarchy.canaries._store.save_barred([(bytes([number]) * 16,)])
                hierarchy.costs._store.save_calibrations({})
            assert home.begun.wait(PATIENCE)
            done = threading.Event()
            executors[0].submit(done.set, lambda error: None)  # as the arena has slabs populated and punched
            worked.append(done.wait(PATIENCE))
            return "the test has seen enough"

        return SimpleNamespace(run=run, drain=lambda seconds: True)

    monkeypatch.setattr(process, "Loop", loop)
    monkeypatch.setattr(process, "_signals", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(process, "_HOME_SECONDS", 0.01)
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    whys: list[str] = []

    def serve() -> None:
        keyring = Keyring.ephemeral()
        whys.append(process._serve(tmp_path, Settings(), 64 << 20, keyring, [], [], False, lambda: None, Settings))

    ends(serve)
    assert worked == [True]
    assert whys == ["the test has seen enough"]


def test_work_that_is_asked_for_while_it_is_done_is_done_once_more() -> None:
    gate, runs = threading.Semaphore(0), []

    def work() -> None:
        gate.acquire()
        runs.append(1)

    background = Background(work, "test")
    background.wake()
    eventually(lambda: background._asked == 1)
    gate.release()
    background.wake()
    background.wake()
    gate.release(2)
    assert background.close(PATIENCE)
    assert 1 <= len(runs) <= 3
    assert background._done == background._asked == 3
