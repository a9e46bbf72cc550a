"""Unnamed files: invisible to others, and their space is free again when their descriptor is closed, also when the
process is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stepwell.io.files import allocate
from stepwell.longctx.store.trouble import unusable

_NO_UNNAMED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)
ALIGNMENT = 4096


class ExtentFile(Protocol):
    """File of extents. All calls block, raise OSError, and may come from any thread."""

    direct: bool
    """True if I/O goes past the page cache: offsets, lengths and addresses are multiples of 4096."""

    def read(self, into: memoryview, offset: int) -> int:
        """Bytes read; fewer than `into` has only where the file ends."""

    def write(self, data: memoryview, offset: int) -> None:
        """Writes everything, or raises OSError."""

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocates space for this range, or raises ENOSPC."""

    def clear(self) -> None:
        """Frees all its space; it is then empty."""

    def close(self) -> None:
        """Idempotent."""


OpenFile = Callable[[Path, bool], ExtentFile]
"""Makes one in this directory; the second argument asks for direct I/O."""


class UnnamedFile:
    """An unnamed file in `directory`, which is made (0700) if it is missing. On a filesystem without unnamed files it
    is made 0600 under a random name, which is removed before anything is written. `direct`: asks for O_DIRECT, which
    some filesystems refuse. Raises AccessDenied SW-608 if no file can be made."""

    def __init__(self, directory: Path, direct: bool) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = _open(directory)
        except OSError as error:
            raise unusable(directory, error) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self.direct = direct and _made_direct(self.fd)
        if not self.direct:
            with contextlib.suppress(OSError):  # advice only: pages are read one here and one there
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, into: memoryview, offset: int) -> int:
        done = 0
        while done < len(into):
            n = os.preadv(self.fd, [into[done:]], offset + done)
            done += n
            if n == 0 or (self.direct and n % ALIGNMENT):
                break
        return done

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            n = os.pwritev(self.fd, [data[done:]], offset + done)
            if n == 0 or (self.direct and n % ALIGNMENT):
                raise OSError(errno.EIO, "short write")
            done += n

    def reserve(self, offset: int, nbytes: int) -> None:
        allocate(self.fd, offset, nbytes)

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        self._close()


def _open(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED:
            raise
    path = directory / f".stepwell-{secrets.token_hex(8)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _made_direct(fd: int) -> bool:
    """True if the file takes O_DIRECT: some filesystems refuse the flag, some only the first write."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.pwrite(fd, page, 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True
