"""Files of one injected directory: the kernel's in the well, simulated or failing ones in tests.

All calls block and raise OSError. Names are single components below one open directory: no path of ours ever follows a
symbolic link or leaves it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from stepwell.io.memory import Bytes

_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in place of a file does not hang
_LOCK_PAUSES = (0.01, 0.02, 0.05)  # who only asks whether it is held holds it for an instant
_ZERO_RANGE = 0x10  # FALLOC_FL_ZERO_RANGE
_ZEROS = memoryview(mmap.mmap(-1, 1 << 20))  # aligned for O_DIRECT


class File(Protocol):
    def read(self, into: Bytes, offset: int) -> int:
        """Reads from `offset` and returns the number of bytes: fewer than `into` has at the end of the file only.
        Offset, length and address are multiples of 4096."""

    def write(self, data: Bytes, offset: int) -> None:
        """Writes all of `data`, or raises."""

    def blank(self) -> bool:
        """True if the file has space but no data, as far as the filesystem reports."""

    def zero(self, offset: int, nbytes: int) -> int:
        """Makes this range read as zeros; the file keeps its space. Returns the bytes that had to be written for that.
        Offset and length are multiples of 4096, and the range lies within the file."""

    def sync(self) -> None:
        """Makes written bytes survive a power cut."""

    def size(self) -> int: ...

    def close(self) -> None: ...


class Files(Protocol):
    direct: bool
    """True if I/O goes past the page cache."""

    def names(self) -> list[str]:
        """Names of everything in the directory."""

    def create(self, name: str, nbytes: int) -> File:
        """Creates a file, 0600, with its space allocated where the filesystem can. FileExistsError if there is one."""

    def open(self, name: str) -> File:
        """An existing regular file (OSError EINVAL for anything else), for reading and writing; where it may not be
        written, for reading only."""

    def unlink(self, name: str) -> None: ...

    def sync(self) -> None:
        """Makes the removal of unlinked files survive a power cut."""

    def free(self) -> tuple[int, int]:
        """Bytes that this user may still take on the filesystem, and its size."""

    def close(self) -> None: ...


class SystemFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, into: Bytes, offset: int) -> int:
        done, view = 0, into.data
        while done < len(view):
            n = os.preadv(self._fd, [view[done:]], offset + done)
            done += n
            if n == 0 or n % 4096:  # the end, or O_DIRECT could not go on from here
                break
        return done

    def write(self, data: Bytes, offset: int) -> None:
        done, view = 0, data.data
        while done < len(view):
            n = os.pwritev(self._fd, [view[done:]], offset + done)
            if n == 0 or n % 4096:
                raise OSError(errno.EIO, "short write")
            done += n

    def zero(self, offset: int, nbytes: int) -> int:
        if _fallocate(self._fd, _ZERO_RANGE, offset, nbytes) == 0:
            return 0
        for done in range(0, nbytes, len(_ZEROS)):  # the filesystem cannot, or has trouble, which this then tells
            self.write(np.frombuffer(_ZEROS[: nbytes - done], np.uint8), offset + done)
        return nbytes

    def blank(self) -> bool:
        try:
            os.lseek(self._fd, 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO
        return False

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SystemFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class SystemFiles:
    """`direct`: whether the filesystem takes O_DIRECT, found out at once; else I/O goes through the page cache."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._lock = -1
        try:
            self.direct = self._takes_direct()
        except OSError:
            os.close(self._fd)
            raise

    def _takes_direct(self) -> bool:
        """True if the filesystem takes O_DIRECT: some refuse the flag, some only the first write."""
        try:
            probe = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (*_UNSUPPORTED, errno.EISDIR):
                return False  # no unnamed files here: too unusual for anything but the plain way
            raise
        try:
            fcntl.fcntl(probe, fcntl.F_SETFL, fcntl.fcntl(probe, fcntl.F_GETFL) | os.O_DIRECT)
            with mmap.mmap(-1, 4096) as page:
                os.pwrite(probe, page, 0)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        finally:
            os.close(probe)
        return True

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def create(self, name: str, nbytes: int) -> SystemFile:
        fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            allocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            raise
        return SystemFile(fd)

    def open(self, name: str) -> SystemFile:
        try:
            fd = self._open(name, os.O_RDWR)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            fd = self._open(name, os.O_RDONLY)
        return SystemFile(_regular(fd))

    def _open(self, name: str, flags: int) -> int:
        if self.direct:
            flags |= os.O_DIRECT
        return os.open(name, flags | _SAFE, 0o600, dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some filesystems sync files only
                raise

    def free(self) -> tuple[int, int]:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def lock(self, name: str) -> bool:
        """Takes the lock file `name` for as long as this object lives. False: another process holds it."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        for pause in (*_LOCK_PAUSES, None):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if pause is not None:
                    time.sleep(pause)
                continue
            self._lock = fd
            return True
        os.close(fd)
        return False

    def close(self) -> None:
        for fd in (self._lock, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self._fd = -1


class FilesToRead:
    """Files of a directory for reading only, even while another process writes them."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def open(self, name: str) -> SystemFile:
        """Opens an existing regular file, past the page cache where possible: the cache is not ours to fill."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECT | _SAFE, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=self._fd)
        return SystemFile(_regular(fd))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _regular(fd: int) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocates this range, up to which the file then reaches, or raises ENOSPC; where the filesystem cannot allocate,
    sets the length only. (os.posix_fallocate would write the whole range there.)"""
    code = _fallocate(fd, 0, offset, nbytes)
    if not code:
        return
    if code not in (*_UNSUPPORTED, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    os.ftruncate(fd, max(os.fstat(fd).st_size, offset + nbytes))


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> int:
    """The error's number, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(nbytes)) == 0:
        return 0
    return ctypes.get_errno()
