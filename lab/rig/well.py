"""A real well process under test, in a home and a runtime directory of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepwell.client import control
from stepwell.client.start import find_or_start
from stepwell.errors import BackendDown

PATIENCE_S = 30.0
POLL_S = 0.002
"""Between two looks for an answer, as an engine's steps are."""

HELD = ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots")
"""Of a well's stats: what is 0 when nobody asks for anything."""


def until(holds: Callable[[], bool], patience_s: float = PATIENCE_S, poll_s: float = POLL_S) -> bool:
    """Asks until it is so; False if that was not in time."""
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def eventually(
    holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S, poll_s: float = 5 * POLL_S
) -> None:
    """Raises TimeoutError, `what` being its text, when it does not come true in time."""
    if not until(holds, patience_s, poll_s):
        raise TimeoutError(f"not within {patience_s:g} s: {what}")


@contextlib.contextmanager
def apart() -> Iterator[Path]:
    """A short new folder, gone at the end. Wells started and found meanwhile meet in it, and no setting of the
    environment reaches them."""
    with tempfile.TemporaryDirectory(prefix="stepwell-t-", ignore_cleanup_errors=True) as name:
        runtime = Path(name, "run")
        runtime.mkdir(mode=0o700)
        before = {key: value for key, value in os.environ.items() if key.startswith("STEPWELL_")}
        before |= {key: os.environ[key] for key in ("XDG_RUNTIME_DIR",) if key in os.environ}
        for key in before:
            del os.environ[key]
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        try:
            yield Path(name)
        finally:
            del os.environ["XDG_RUNTIME_DIR"]
            os.environ.update(before)


class RealWell:
    """The well of `home`. Once started it runs until it is stopped or killed, or until this is left; then whatever it
    waits for must be released before, or it stays as long as that hangs."""

    def __init__(self, home: Path, **settings: str | int | float) -> None:
        self.home = home
        self._settings = {"linger": "1h", "linger_empty": "1h", **settings}
        self._pid = 0

    def __enter__(self) -> RealWell:
        self.start()
        return self

    def start(self) -> None:
        """Raises what keeps it from starting."""
        find_or_start(self.home, self._settings, PATIENCE_S)
        self._pid = int(self.stats()["pid"])

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Any thread of its process is there, zombies not counted: one that waits for a device may outlive the rest."""
        states: list[str] = []
        for stat in Path(f"/proc/{self._pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        return any(state not in ("Z", "X") for state in states)

    def stats(self) -> dict[str, int | float | str]:
        return control.stats(self.home, seconds=10)

    def count(self, name: str) -> int:
        """One of its stats; 0 if it has none of this name yet."""
        return int(self.stats().get(name, 0))

    def held(self) -> dict[str, int]:
        """What it holds for somebody, where that is not 0."""
        stats = self.stats()
        return {name: int(stats[name]) for name in HELD if stats[name]}

    def written(self) -> bool:
        """Nothing waits to be written."""
        return self.count("disk_write_queue_bytes") == 0

    def forget_host(self) -> None:
        """Drops host memory's blocks: what is asked for next has to come from below."""
        control.clear(self.home, ["host"])

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill(self) -> None:
        """SIGKILL, and until it is gone. Raises TimeoutError if it does not go."""
        self.signal(signal.SIGKILL)
        eventually(lambda: not self.alive, f"the well, process {self._pid}, is gone after SIGKILL")

    def stop(self) -> None:
        """As `stepwell stop`. Quiet if none runs."""
        try:
            control.stop(self.home, seconds=PATIENCE_S)
        except BackendDown as error:
            if error.code != "SW-505":
                raise
        eventually(lambda: not self.alive, f"the well, process {self._pid}, has ended")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BackendDown):
            self.stop()
        if self.alive:
            self.kill()
