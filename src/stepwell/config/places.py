"""The directories of the disk tier as people write them: "PATH:SIZE", or "PATH" for half of its filesystem.

Pure text: no directory is looked at here. What is behind a path is checked by the tier and by `stepwell doctor`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.units import Amount, parse_amount

_HALF = Amount(percent=Decimal(50))
_FIX = "write the absolute path of a directory and a size, for example /var/lib/stepwell:200GiB or /nvme/stepwell:50%"


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """One directory of the disk tier: its absolute path, and how much may be used, also as a per cent of the size of
    its filesystem. `str()` is what a person would write."""

    path: Path
    size: Amount = _HALF

    def __str__(self) -> str:
        return f"{self.path}:{self.size}"


def parse_places(value: object) -> tuple[DiskPlace, ...]:
    """The places meant by a list of texts, or by one text with commas between them. Raises ConfigError SW-102.

    A path with a comma in it can only be written in a list; one with a colon needs a size behind it. `~` is expanded.
    The same directory twice is an error.
    """
    parts: Sequence[object]
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        raise _bad(f"a value of type {type(value).__name__} is no list of directories", "its form is not accepted")
    places = tuple(part if isinstance(part, DiskPlace) else _place(part) for part in parts)
    seen: set[str] = set()
    for place in places:
        # By name only: two names of one directory are found by the lock that lies in it.
        name = os.path.normpath(place.path)
        if name in seen:
            raise _bad(f"the directory {place.path} is given twice", "its space would be counted twice")
        seen.add(name)
    return places


def _place(text: object) -> DiskPlace:
    if not isinstance(text, str):
        raise _bad(f"{str(text)[:80]!r} is no directory with a size", "there may be no blank behind its colon")
    before, colon, behind = text.strip().rpartition(":")
    size = parse_amount(behind) if colon else _HALF
    named = before if colon else behind
    try:
        path = Path(named).expanduser()
    except RuntimeError:  # the home of an unknown user
        path = Path(named)
    if not path.is_absolute() or "\0" in named:
        raise _bad(f"{named[:200]!r} is not an absolute path", "engine and well may run in different directories")
    return DiskPlace(path, size)


def _bad(what: str, why: str) -> ConfigError:
    return ConfigError("SW-102", what=what, why=why, fix=_FIX)
