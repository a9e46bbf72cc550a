"""One key in a file of its own: 32 random bytes, 0600, checked before it is believed. For saved contexts; the tenants
of a well have theirs in the keyring."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from stepwell.errors import AccessDenied, IntegrityError
from stepwell.vault.memory import KEY_BYTES, cells, wipe

CONTEXT_KEY_NAME = "longctx.key"
"""In stepwell's home."""


def open_key(path: Path) -> memoryview:
    """The key at `path`, in memory for keys; made, and on disk before this returns, where there is none. Of several
    processes that do so at once all have the same.

    Raises AccessDenied SW-610 (cannot be read or made, a symbolic link or no file, of another user, open to others),
    IntegrityError SW-306 (not 32 bytes). The file is then left as it is.
    """
    try:
        if not os.path.lexists(path):
            _create(path)
        return _read(path)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise _denied(path, why) from error


def _create(path: Path) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    key = secrets.token_bytes(KEY_BYTES)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, key) < KEY_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):  # a link never replaces: the first one wins
            os.link(temporary, path, follow_symlinks=False)
        os.fsync(folder)
    finally:
        wipe(key)
        temporary.unlink(missing_ok=True)
        os.close(folder)


def _read(path: Path) -> memoryview:
    # O_NONBLOCK: a pipe in place of the file must not hang us.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _denied(path, "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise _denied(path, f"it belongs to the user with id {status.st_uid}")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _denied(path, f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others could use it")
        key = os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)
    if len(key) != KEY_BYTES:
        wipe(key)
        raise IntegrityError(
            "SW-306",
            what=f"the key file {path} is damaged",
            why=f"it does not have {KEY_BYTES} bytes",
            fix="restore it from a copy, or move it away to start with a new key (what it sealed becomes unreadable)",
        )
    return cells.take(key)


def _denied(path: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-610",
        what=f"the key file {path} is not used",
        why=why,
        fix="make it a regular file of your own with mode 0600, or set STEPWELL_HOME to another directory",
    )
