"""The pauses, saved in home: a pause outlives the well and the host, until an operator ends it.

Whether a file that is there and cannot be read says "paused" is not known. Serving what an operator has switched off
may be wrong, or in the way; not serving costs time. So everything is paused then, with one message, until it is
resumed. That there is no file means that nothing was ever paused.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepwell.errors import BackendDown
from stepwell.hierarchy.pauses import one_line
from stepwell.hierarchy.saved import KINDS, PauseRecord
from stepwell.serve.home.state_file import StateFile, StateWriter

PAUSED_NAME = "paused.json"
"""Name of the file in home. Its content, by what is paused: since when (seconds since 1970), by which user, and why."""

_MAX_UID = (1 << 32) - 1

log = logging.getLogger("stepwell.serve")


class PauseList(StateFile):
    """The file of `home`, whose lock the caller holds if it writes."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, PAUSED_NAME, "what is paused now will not outlive this well")
        self._newest: Any = None
        self._written: Any = None

    def read(self, wall: Callable[[], float] = time.time) -> list[PauseRecord]:
        """The saved pauses; a pause of everything where the file cannot be read."""
        try:
            return _pauses(self.content())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            log.warning("%s", _unknown(self.path, error))
            why = f"{PAUSED_NAME} in home cannot be read, and may say so"
            return [PauseRecord(kind, wall(), os.geteuid(), why) for kind in KINDS]

    def keep(self, pauses: Sequence[PauseRecord], keeper: StateWriter) -> None:
        """Queues the pauses to be written."""
        self._newest = _content(pauses)
        keeper.keep(self, self._newest)

    def put(self, pauses: Sequence[PauseRecord]) -> None:
        """On disk when this returns; raises OSError."""
        self.write(_content(pauses))

    def write(self, value: Any) -> None:
        super().write(value)
        self._written = value

    @property
    def kept(self) -> bool:
        """The newest pauses are on disk."""
        return self._written is self._newest


def _content(pauses: Sequence[PauseRecord]) -> dict[str, Any]:
    return {p.kind: {"since": p.since, "uid": p.uid, "reason": p.reason} for p in pauses}


def _pauses(content: Any) -> list[PauseRecord]:
    """Raises ValueError, TypeError, KeyError or ArithmeticError (a number beyond all that can be) unless it is what
    this or an earlier version has written, all of it."""
    if not isinstance(content, dict) or not content.keys() <= set(KINDS):
        raise ValueError("it is not a list of what is paused")
    pauses = []
    for kind in KINDS:
        if kind in content:
            since, uid = float(content[kind]["since"]), int(content[kind]["uid"])
            if not math.isfinite(since):
                raise ValueError("it is paused since no time")
            if not 0 <= uid <= _MAX_UID:
                raise ValueError("no user has paused it")
            pauses.append(PauseRecord(kind, since, uid, one_line(str(content[kind]["reason"]))))
    return pauses


def _unknown(path: Path, error: Exception) -> BackendDown:
    return BackendDown(
        "SW-511",
        what="recalls and spills are paused",
        why=f"{path} is there and cannot be read, so it is not known whether they were paused: {error}",
        fix="`stepwell resume` ends it and writes the file anew",
    )
