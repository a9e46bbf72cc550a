"""Budgets in bytes for host memory and directories, shared by all stores of one cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.config.places import DiskPlace, parse_places
from stepwell.longctx.store.trouble import unusable
from stepwell.units import parse_size


class Budget:
    """At most `limit` bytes are taken at any time. Any thread may use it, and no call blocks. Raises ValueError for a
    negative limit."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"a budget of {limit} bytes")
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0

    @property
    def left(self) -> int:
        with self._lock:
            return self.limit - self._used

    def take(self, nbytes: int) -> bool:
        """False: there is not so much left, and nothing is taken."""
        with self._lock:
            fits = self._used + nbytes <= self.limit
            self._used += nbytes if fits else 0
            return fits

    def give(self, nbytes: int) -> None:
        """Returns bytes that were taken."""
        with self._lock:
            assert 0 <= nbytes <= self._used
            self._used -= nbytes


def shared(bound: int | Budget) -> Budget:
    """A bound in bytes as a budget of its own; a budget is itself, shared with its other users."""
    return bound if isinstance(bound, Budget) else Budget(bound)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Space that may be used, shared by all stores that are given the same object. `host`: None for no host tier."""

    host: Budget | None
    disks: tuple[tuple[Path, Budget], ...] = ()

    @classmethod
    def of(cls, host: str | int | None, disk: str | Sequence[DiskPlace | str] | None) -> Bounds:
        """`host`: a size as `parse_size` reads it. `disk`: places as `parse_places` reads them, their sizes in bytes or
        as a per cent of their filesystem as it is now. Raises ConfigError SW-102 for what is neither, AccessDenied
        SW-608 for a filesystem that cannot be asked."""
        places = parse_places(disk) if disk is not None else ()
        return cls(
            Budget(parse_size(host)) if host is not None else None,
            tuple((place.path, Budget(_bytes(place))) for place in places),
        )


def _bytes(place: DiskPlace) -> int:
    """Bytes that may be used at this place."""
    there = next((folder for folder in (place.path, *place.path.parents) if folder.is_dir()), Path("/"))
    try:
        status = os.statvfs(there)
    except OSError as error:
        raise unusable(place.path, error) from error
    return place.size.of(status.f_blocks * status.f_frsize)
