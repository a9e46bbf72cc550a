"""Private files: checked to be this user's alone before their content is used, and written so that no one else can read
them. For keys: no copy of the content stays in a buffer, and a file is on disk before it has its name.

A file is believed only if it is a regular file, not reached by a symbolic link, of this user, and closed to group and
others. Errors say why it is not, in words that follow "the file is not used:". Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


class NotPrivate(Exception):
    """The file may have been written or read by others; the message says why."""


class TooLarge(Exception):
    """The file has more bytes than asked for."""


def read(path: Path, most: int) -> bytearray:
    """The content of a private file, at most `most` bytes, which the caller may wipe. Never waits for another process,
    whatever lies at `path`. Raises NotPrivate, TooLarge, OSError."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer. It has no effect on a regular file.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivate("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise NotPrivate(f"it belongs to the user with id {status.st_uid}")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise NotPrivate(f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others could use it")
        content, at = bytearray(min(status.st_size, most) + 1), 0
        while at < len(content) and (got := os.readv(fd, [memoryview(content)[at:]])):  # unbuffered: leaves no copy
            at += got
        del content[at:]
    finally:
        os.close(fd)
    if len(content) > most or status.st_size > most:
        raise TooLarge
    return content


def write_beside(path: Path, content: bytes | bytearray) -> Path:
    """A new file beside `path` with this content, 0600 and on disk, to be linked or renamed to `path`; see `leftovers`.
    Raises OSError, and leaves nothing then."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb", buffering=0) as file:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def create(path: Path, content: bytes | bytearray) -> None:
    """Creates `path` with this content, on disk when this returns, unless there is such a file: of several processes
    that do so at once, the first wins. Raises OSError."""
    temporary = write_beside(path, content)
    try:
        # A link never replaces, unlike a rename. The temporary file is missing only if the winner has removed it as a
        # leftover.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(temporary, path, follow_symlinks=False)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def leftovers(path: Path) -> Iterator[Path]:
    """Files of `write_beside` that killed processes have left, and those that others are writing at this moment."""
    return path.parent.glob(f"{path.name}.{'[0-9a-f]' * 16}.new")


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """A descriptor of the directory, open within the `with` block. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Names that were linked, renamed or removed in the directory survive a power cut. Raises OSError."""
    with opened_folder(folder) as fd:
        os.fsync(fd)
