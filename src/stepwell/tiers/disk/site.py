"""Checks whether a directory may hold the tier's files, before a byte is written; errors name a fix."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from stepwell.errors import AccessDenied, BackendDown, ConfigError
from stepwell.io.files import SystemFiles
from stepwell.io.paths import MEMORY, NETWORK, filesystem
from stepwell.tiers.disk.recovery import LOCK, README
from stepwell.tiers.disk.tier import MIN_SEGMENT, MIN_SEGMENTS, Site
from stepwell.units import Amount, format_size

_MAX_FILES = 1 << 20
_README = """\
This directory belongs to stepwell, a cache for the KV blocks of LLM inference.

The files *.seg hold cached blocks. They are only a cache: once no `stepwell serve` is
running, they may be deleted; engines then recompute what was cached, and nothing else
is lost. `stepwell cache fsck` says what is in them.
"""


def take(path: Path, size: Amount, reserve: Amount) -> Site:
    """Makes the directory (0700) if it is missing, checks it, takes its lock and leaves a README in it.

    Raises AccessDenied SW-608 (cannot be used, is not ours, or is open to others), SW-609 (on a network filesystem or
    in memory), ConfigError SW-114 (the size cannot work there), BackendDown SW-506 (another well uses it).
    """
    try:
        _check_kind(path)  # before anything is made there
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        _check_owner(path)
        files = SystemFiles(path)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    try:
        if not files.lock(LOCK):
            raise BackendDown(
                "SW-506",
                what=f"the disk tier's directory {path} is in use",
                why="another well holds its lock",
                fix="give each well directories of its own, or end the other one with `stepwell stop`",
            )
        _, total = files.free()
        limit, left = size.of(total), reserve.of(total)
        _check_size(path, limit, left, total)
        _leave_readme(path)
    except OSError as error:
        files.close()
        raise _unusable(path, error.strerror or str(error)) from error
    except BaseException:
        files.close()
        raise
    return Site(files, limit, left)


def usable_bytes(paths: Iterable[Path], free: int, reserve: int) -> int:
    """Bytes that directories of one filesystem can hold together: those of their files, and the free space beyond the
    reserve. Examines each file, which is slow where there are many. Raises OSError."""
    return max(0, sum(map(_used_bytes, paths)) + free - reserve)


def _used_bytes(path: Path) -> int:
    """Bytes on disk of the files directly in `path`, at most the first million of them."""
    if not path.is_dir():
        return 0
    total = 0
    with os.scandir(path) as entries:
        for _, entry in zip(range(_MAX_FILES), entries, strict=False):
            if entry.is_file(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _check_owner(path: Path) -> None:
    status = path.lstat()
    why = ""
    if not stat.S_ISDIR(status.st_mode):
        why = "it is not a directory, or a symbolic link to one"
    elif status.st_uid != os.geteuid():
        why = f"it belongs to the user with id {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others could put files there"
    if why:
        raise _unusable(path, why)


def _check_kind(path: Path) -> None:
    kind = filesystem(path)
    if kind in NETWORK:
        why, fix = "locks, errors and speed differ there, and several hosts would share it", "use a local disk"
    elif kind in MEMORY:
        why, fix = (
            "it is memory, which the host tier uses better",
            "raise `host` instead, or name a directory on a disk",
        )
    else:
        return
    raise AccessDenied("SW-609", what=f"the disk tier's directory {path} is on {kind}", why=why, fix=fix)


def _check_size(path: Path, limit: int, reserve: int, total: int) -> None:
    if limit < MIN_SEGMENTS * MIN_SEGMENT:
        why = f"a disk tier has at least {MIN_SEGMENTS} segments of {format_size(MIN_SEGMENT)}"
        fix = f"give it at least {format_size(MIN_SEGMENTS * MIN_SEGMENT)}"
    elif limit + reserve > total:
        why = (
            f"the filesystem has {format_size(total)}, of which {format_size(reserve)} are to stay free (disk_reserve)"
        )
        fix = f"give it at most {(total - reserve) >> 20}MiB"
    else:
        return
    raise ConfigError("SW-114", what=f"the disk tier cannot have {format_size(limit)} in {path}", why=why, fix=fix)


def _leave_readme(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        fd = os.open(path / README, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(_README)


def _unusable(path: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-608",
        what=f"the disk tier's directory {path} cannot be used",
        why=why,
        fix="name a directory of your own with mode 0700 on a local disk",
    )
