"""The off switch of a home without a well: what is paused is written there, and the next well begins with it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepwell.client.control import pid_at
from stepwell.client.start import lock, rendezvous
from stepwell.errors import AccessDenied, BackendDown
from stepwell.hierarchy.pauses import Pauses, one_line
from stepwell.hierarchy.saved import Kind, PauseRecord, StateStore
from stepwell.io.paths import check_home
from stepwell.serve.home.holding import holding
from stepwell.serve.home.pauses import PauseList


def pause(home: Path, kinds: Sequence[Kind], reason: str) -> list[PauseRecord]:
    """Pauses `kinds` and returns all pauses, on disk. Raises BackendDown SW-501 if a well runs, starts or ends, and
    AccessDenied if home is not this user's or cannot be written."""
    with _alone(home) as pauses:
        for kind in kinds:
            pauses.pause(PauseRecord(kind, time.time(), os.geteuid(), one_line(reason)))
        return pauses.all


def resume(home: Path, kinds: Sequence[Kind]) -> list[PauseRecord]:
    """The end of a pause; otherwise as `pause`."""
    with _alone(home) as pauses:
        for kind in kinds:
            pauses.resume(kind, os.geteuid())
        return pauses.all


class _OnDisk(StateStore):
    """Pauses are on disk when a call returns; raises OSError."""

    def __init__(self, listed: PauseList) -> None:
        self._listed = listed

    def save_paused(self, paused: Sequence[PauseRecord]) -> None:
        self._listed.put(paused)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[Pauses]:
    """The pauses of `home`; no well of it can start within the `with` block, at whatever socket."""
    check_home(home)
    place = rendezvous(home)
    with lock(place.lock) as taken:
        if taken is None or pid_at(place.socket) is not None:
            raise BackendDown(
                "SW-501",
                what=f"a well of {home} starts or ends at this moment",
                why="it has begun with the earlier pauses, and is starting or ending",
                fix="repeat the command",
            )
        with holding(home, place):
            listed = PauseList(home)
            try:
                yield Pauses(lambda event: None, listed.read(), _OnDisk(listed))
            except OSError as error:
                raise AccessDenied(
                    "SW-601",
                    what=f"{listed.path} cannot be written, and the pauses have not changed",
                    why=error.strerror or str(error),
                    fix="make room there and give yourself the permission, or do not start the well",
                ) from error
