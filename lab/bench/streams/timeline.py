"""What happens to each block of a streamed recall, and when: it is read, opened, heard of by the worker, and copied."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab import FOLDER
from lab.bench.streams.runs import Engine, Run
from lab.bench.streams.watched import Span
from lab.rig.well import eventually
from stepwell.client import control
from stepwell.client.start import find
from stepwell.client.worker import Hold, WorkerClient
from stepwell.demo.model import cache_folder
from stepwell.demo.page_cache import drop_page_cache
from stepwell.errors import BackendDown
from stepwell.protocol.messages import SLOT_REF, FromWell, Landed

RUNS = 4
"""Bytes of host memory, in runs."""


class HearingWorker(WorkerClient):
    """Notes when it has heard that a block landed, by where it lies."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.heard: dict[bytes, float] = {}
        super().__init__(*arguments, **options)

    def received(self, message: FromWell, fds: Sequence[int]) -> None:
        if isinstance(message, Landed):
            now = time.monotonic()
            self.heard.update((ref.tobytes(), now) for ref in np.frombuffer(message.slots, SLOT_REF))
        super().received(message, fds)


class CopyingEngine(Engine):
    """Notes when blocks are copied, in that order, by where they lie."""

    def __init__(self, home: Path, nbytes: int) -> None:
        self.copied: dict[bytes, Span] = {}
        super().__init__(home, nbytes, worker=HearingWorker)

    def copy_block(self, hold: Hold, session: int, run: Run, at: int, ref: np.void) -> None:
        began = time.monotonic()
        super().copy_block(hold, session, run, at, ref)
        self.copied[ref.tobytes()] = began, time.monotonic()


def timeline(block: int, nbytes: int, repetitions: int) -> list[dict[str, Any]]:
    """Of a run of `nbytes`, for each block, in milliseconds since the run was asked for: of so many recalls, the one
    that took the median."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="bench-timeline-", dir=cache_folder()))
    try:
        recalls: list[tuple[float, float, dict[bytes, Span]]] = []
        with _watched(base, RUNS * nbytes) as home, CopyingEngine(home, block) as engine:
            run = Run(0, nbytes // block, block)
            engine.spill(run, partial(control.stats, home))
            for _ in range(repetitions):
                control.clear(home, ["host"])
                drop_page_cache(base)
                engine.copied = {}
                began = time.monotonic()
                ((seconds, blocks),) = engine.recall(run, streamed=True)
                if blocks < run.blocks:
                    raise TimeoutError(f"only {blocks} of {run.blocks} blocks were recalled")
                recalls.append((seconds, began, engine.copied))
        lines = map(json.loads, (base / "marks").read_text().splitlines())
        marks = {bytes.fromhex(where): (read, opened) for where, read, opened in lines}
        _, began, copied = sorted(recalls, key=lambda each: each[0])[repetitions // 2]
        assert isinstance(engine.worker, HearingWorker)
        heard = engine.worker.heard
        return [_row(at, began, *marks[where], heard[where], copied[where]) for at, where in enumerate(copied)]
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _row(at: int, began: float, read: list[Span], opened: list[Span], heard: float, copied: Span) -> dict[str, Any]:
    def ms(*moments: float) -> list[float]:
        return [round(1e3 * (moment - began), 3) for moment in moments]

    return {
        "block": at,
        "read": [ms(*span) for span in read],
        "opened": [ms(*span) for span in opened],
        "heard": ms(heard)[0],
        "copied": ms(*copied),
    }


@contextmanager
def _watched(base: Path, host: int) -> Iterator[Path]:
    """The home of a watched well, which writes what it has noted to `base`/marks at the end."""
    home = base / "home"
    disk = {"disk": f"{base / 'disk'}:4GiB", "disk_reserve": "1GiB"}
    settings = {"host": host, **disk, "recall": "always", "log_level": "warning"}
    command = [sys.executable, "-m", "lab.bench.streams.watched", str(home), str(base / "marks")]
    with subprocess.Popen(command, cwd=FOLDER, stdin=subprocess.PIPE, text=True) as well:
        assert well.stdin is not None
        well.stdin.write(json.dumps(settings))
        well.stdin.close()
        try:
            eventually(lambda: well.poll() is not None or _serves(home), "a well serves")
            yield home
        finally:
            well.terminate()
            well.wait()


def _serves(home: Path) -> bool:
    with contextlib.suppress(BackendDown):
        return bool(find(home))
    return False
