"""The demo's own folder: home of its well and log of its engine, gone when the demo ends.

A lock on it lives as long as the demo's process. What a killed demo left behind is removed by the next one, its
lingering well included; a demo that runs beside this one is not touched.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stepwell.demo.engine import EngineFailed
from stepwell.demo.well import DemoWell
from stepwell.errors import StepwellError

_PREFIX, _LOCK = "demo-", "lock"


@contextmanager
def demo_folder(base: Path) -> Iterator[Path]:
    """A fresh folder below `base`: an earlier demo's blocks must not make a cold question warm.

    After EngineFailed it stays, with the log, until the next demo.
    """
    base.mkdir(parents=True, exist_ok=True)
    _remove_stale(base)
    # Locked before it has the name that others look for, or they could take it for stale.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    with (unnamed / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = unnamed.rename(base / unnamed.name.removeprefix("."))
        try:
            yield folder
        except EngineFailed:
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                if _free(lock):
                    DemoWell(folder / "home", 0).stop()
                    shutil.rmtree(folder, ignore_errors=True)
        except (OSError, StepwellError):
            continue  # not one of ours, gone meanwhile, or its well does not stop: nothing to do with this demo


def _free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
