"""Small files of home that tell the next well what this one knows: whole or not there, written beside its work."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from stepwell.io import whole
from stepwell.io.executor import Executor

_MOST_BYTES = 1 << 20

log = logging.getLogger("stepwell.serve")


class KeptFile:
    """One file of `home`, whose lock the caller holds: JSON, ASCII. `lost`: what it costs when it cannot be written."""

    def __init__(self, home: Path, name: str, new_name: str, lost: str) -> None:
        self._home = home
        self._name = name
        self._new_name = new_name
        self._lost = lost
        self._lock = threading.Lock()  # one job writes at a time, and always what is newest
        self._wanted: Any = None

    def load(self) -> Any:
        """What was written last; None where there is nothing, or nothing that can be read."""
        try:
            fd = os.open(self._home / self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s in home cannot be read: %s", self._name, error.strerror)
            return None
        try:
            with open(fd, "rb") as file:
                return json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            self.damaged(error)
            return None

    def damaged(self, error: Exception) -> None:
        """Its content is not what it should be."""
        log.warning("%s in home is damaged and left out: %s", self._name, error)

    def store(self, value: Any, executor: Executor) -> None:
        """Has it written by a job: an fsync is nothing for the thread that serves."""
        self._wanted = value
        executor.submit(self.flush, lambda error: None)

    def flush(self) -> None:
        """Writes what is still to be written; on disk when this returns. Any thread."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is None:
                return
            try:
                self.write(wanted)
            except OSError as error:
                log.warning("%s: %s: %s", self._lost, self._home, error.strerror)

    def write(self, value: Any) -> None:
        whole.replace(self._home, self._name, self._new_name, json.dumps(value))
