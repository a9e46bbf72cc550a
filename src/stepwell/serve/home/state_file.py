"""Small files in home that carry state to the next well. They are written whole, on a thread of their own.

Home may lie on a filesystem that hangs. That costs the next well this state, and this well nothing. Of each file only
the newest content waits to be written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwell.io import whole
from stepwell.io.process.background import Background
from stepwell.log import RateLimited

_MAX_BYTES = 1 << 20
_LATE_SECONDS = 10.0

log = logging.getLogger("stepwell.serve")
_limited = RateLimited(log)


class StateWriter:
    """Writes state files on a thread of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wanted: dict[StateFile, Any] = {}
        self._since: float | None = None  # when the write under way began
        self._background = Background(self._write, "stepwell-home")

    def keep(self, file: StateFile, value: Any) -> None:
        """Queues `value` to be written, in place of one of this file that still waits. Never blocks."""
        with self._lock:
            self._wanted[file] = value
            since = self._since
        self._background.wake()
        if since is not None and self._clock() - since >= _LATE_SECONDS:
            _limited.log(
                logging.WARNING,
                "home",
                "home does not answer, a write to it has taken %d s: %s",
                *(self._clock() - since, file.lost),
            )

    def settle(self, seconds: float) -> bool:
        """Waits until all is written. False: it is not, in that time."""
        return self._background.settle(seconds)

    def close(self, seconds: float) -> bool:
        """Writes what waits and ends the thread. False: it hangs, and is not waited for any longer."""
        return self._background.close(seconds)

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    return
                file, value = self._wanted.popitem()
                self._since = self._clock()
            try:
                file.write(value)
            except OSError as error:
                _limited.log(logging.WARNING, f"write-{file.path.name}", "%s: %s", file.lost, error)
            finally:
                with self._lock:
                    self._since = None


class StateFile:
    """One file of `home`, whose lock the caller holds: JSON, ASCII. `lost`: the consequence if it cannot be written,
    for the log."""

    def __init__(self, home: Path, name: str, lost: str) -> None:
        self._home = home
        self._name = name
        self.lost = lost

    @property
    def path(self) -> Path:
        return self._home / self._name

    def content(self) -> Any:
        """The content of the file. Raises FileNotFoundError, OSError, ValueError and RecursionError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return json.loads(file.read(_MAX_BYTES))

    def load(self) -> Any:
        """The content of the file; None if there is none, or none that can be read."""
        try:
            return self.content()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self.damaged(error)
            return None

    def damaged(self, error: Exception) -> None:
        """Logs that the content is not what it should be."""
        log.warning("%s in home is damaged and left out: %s", self._name, error)

    def write(self, value: Any) -> None:
        """On disk when this returns; raises OSError."""
        whole.replace(self._home, self._name, json.dumps(value))
