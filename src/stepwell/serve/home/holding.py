"""Holding a home: one home has one well, and `client.holder` finds it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from stepwell.client.asking import within
from stepwell.client.holder import HOLDER_NAME, held_by, holder, record
from stepwell.client.start import lock
from stepwell.errors import BackendDown
from stepwell.io.paths import Rendezvous

_TRIES, _PAUSE_S = 50, 0.01  # a process that only asks whether it is locked holds it for a moment


@contextlib.contextmanager
def holding(home: Path, place: Rendezvous) -> Iterator[None]:
    """Holds `home` for a well that is met at `place`. Raises BackendDown SW-501 if another one does, and OSError."""
    path = home / HOLDER_NAME
    for _ in range(_TRIES):
        with lock(path) as taken:
            if taken is not None:
                os.ftruncate(taken, 0)
                os.pwrite(taken, record(place), 0)
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError, BackendDown):  # a home that hangs keeps no well from ending
                        within(home, lambda: os.unlink(path))
                return
        time.sleep(_PAUSE_S)
    raise held_by(home, holder(home))
