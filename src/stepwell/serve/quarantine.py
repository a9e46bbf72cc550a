"""Which namespaces are in quarantine, written down in home: a well that starts again must not trust them.

Only tags are kept, which are keyed and tell nothing of models. A list that cannot be written or read costs the next
well its memory of the quarantine, never this one its service: its blocks are dropped when it begins, and a canary finds
what is left.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from stepwell.config.access import MAX_TENANTS
from stepwell.hierarchy.canaries import MOST_NAMESPACES, Tags
from stepwell.io import whole
from stepwell.io.executor import Executor

LIST_NAME = "quarantine.json"
"""Of the file in home: a list of namespaces, each a list of its tags in hexadecimal digits."""

NEW_LIST_NAME = f"{LIST_NAME}.new"
"""Of what a killed process may have left half written; the next one writes over it."""

MOST_LISTED = (1 + MAX_TENANTS) * MOST_NAMESPACES
"""That are believed: the latest."""

_MOST_BYTES = 1 << 20

log = logging.getLogger("stepwell.serve")


class QuarantineList:
    """The list of `home`, whose lock the caller holds."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()  # one job writes at a time, and always what is newest
        self._wanted: Sequence[Tags] | None = None

    def read(self) -> list[Tags]:
        """What was written last; nothing where that cannot be read."""
        try:
            fd = os.open(self._home / LIST_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("%s in home cannot be read: %s", LIST_NAME, error.strerror)
            return []
        try:
            with open(fd, "rb") as file:
                barred = [tuple(map(bytes.fromhex, tags)) for tags in json.loads(file.read(_MOST_BYTES))]
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s in home is damaged and left out: %s", LIST_NAME, error)
            return []
        return [tags for tags in barred if tags][-MOST_LISTED:]

    def keep(self, barred: Sequence[Tags], executor: Executor) -> None:
        """Has it written by a job: an fsync is nothing for the thread that serves."""
        self._wanted = list(barred)
        executor.submit(self.flush, lambda error: None)

    def flush(self) -> None:
        """Writes what is still to be written; on disk when this returns. Any thread."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is None:
                return
            try:
                self._write(wanted)
            except OSError as error:
                log.warning("the quarantine will not outlive this well: %s: %s", self._home, error.strerror)

    def _write(self, barred: Sequence[Tags]) -> None:
        text = json.dumps([[tag.hex() for tag in tags] for tags in barred])
        whole.replace(self._home, LIST_NAME, NEW_LIST_NAME, text)
