"""A key in a file of its own: 32 random bytes, 0600, for saved contexts. The tenants of a well have theirs in the
keyring."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from stepwell.errors import AccessDenied, IntegrityError
from stepwell.io import private
from stepwell.vault.memory import KEY_BYTES, cells, wipe

CONTEXT_KEY_NAME = "longctx.key"
"""File name of the key of saved contexts, in stepwell's home."""


def open_key(path: Path) -> memoryview:
    """The key at `path`, in memory for keys. Without one it is made, and is on disk before this returns; of several
    processes that do so at once, all get the same.

    Raises AccessDenied SW-610 (cannot be read or made, a symbolic link or no file, of another user, open to others),
    IntegrityError SW-306 (not 32 bytes). The file is then left as it is.
    """
    try:
        if not os.path.lexists(path):
            _create(path)
        return _read(path)
    except OSError as error:
        raise _denied(path, error.strerror or str(error)) from error


def _create(path: Path) -> None:
    key = secrets.token_bytes(KEY_BYTES)
    try:
        private.create(path, key)
    finally:
        wipe(key)


def _read(path: Path) -> memoryview:
    try:
        key = private.read(path, KEY_BYTES)
    except private.NotPrivate as error:
        raise _denied(path, str(error)) from None
    except private.TooLarge:
        raise _damaged(path) from None
    if len(key) != KEY_BYTES:
        wipe(key)
        raise _damaged(path)
    return cells.take(key)


def _damaged(path: Path) -> IntegrityError:
    return IntegrityError(
        "SW-306",
        what=f"the key file {path} is damaged",
        why=f"it does not have {KEY_BYTES} bytes",
        fix="restore it from a copy, or move it away to start with a new key (what it sealed becomes unreadable)",
    )


def _denied(path: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-610",
        what=f"the key file {path} is not used",
        why=why,
        fix="make it a regular file of your own with mode 0600, or set STEPWELL_HOME to another directory",
    )
