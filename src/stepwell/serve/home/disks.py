"""The directories that hold blocks sealed with the keyring of a home, saved in that home.

Settings name only those that a person wrote there: options of a command or of an engine are gone when the well has
ended. `stepwell uninstall` deletes the keyring, and without it none of these directories can be read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from stepwell.io import whole

LIST_NAME = "disks.json"
"""Name of the file in home. Its content: a list of absolute paths, the latest last."""

MAX_DIRECTORIES = 256
"""Directories; beyond that the earliest are forgotten."""

_MAX_BYTES = 8 << 20  # of as many paths, each as long as a path can be


def remember(home: Path, directories: Iterable[Path]) -> None:
    """Adds them to those of `home`, whose lock the caller holds. On disk when this returns; raises OSError."""
    known = remembered(home)
    new = [Path(os.path.realpath(directory)) for directory in directories]
    if set(new) <= set(known):
        return
    kept = [*(path for path in known if path not in new), *new][-MAX_DIRECTORIES:]
    whole.replace(home, LIST_NAME, json.dumps([str(path) for path in kept]))


def remembered(home: Path) -> list[Path]:
    """The directories that were added, whether they still exist or not; none where the file cannot be read."""
    try:
        fd = os.open(home / LIST_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            paths = json.loads(file.read(_MAX_BYTES))  # msgspec takes no names that are not UTF-8
    except (OSError, ValueError, RecursionError):
        return []
    listed = paths if isinstance(paths, list) else []
    return [Path(path) for path in listed if isinstance(path, str) and os.path.isabs(path) and "\0" not in path]
