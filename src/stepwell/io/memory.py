"""Shared memory: sealed memfds that are made, populated and given back piece by piece.

`Memory` is injected into the hierarchy so that tests can refuse or delay it. The owner populates (first touch is
charged to its memory cgroup); everyone else maps what is already there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stepwell.errors import CapacityError, Unsupported

PIECE = 32 << 20
"""Bytes populated by one call: bounds how long a job can run (some 25 to 100 ms)."""

_MADV_DONTFORK, _MADV_DONTDUMP, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 10, 16, 22, 23
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2

Bytes = npt.NDArray[np.uint8]

_private: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_parents: list[mmap.mmap] = []
"""In a forked child: its parent's mappings. Closing one would unmap addresses that the child may use for something
else."""

os.register_at_fork(after_in_child=lambda: _parents.extend(_private))


def keep_private(mapped: mmap.mmap) -> None:
    """Keeps a mapping out of forks and core dumps. Raises OSError."""
    _private.add(mapped)
    for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
        mapped.madvise(advice)


class Mapping:
    """One process's view of a slab's descriptor. Not inherited by forks, not in core dumps."""

    def __init__(self, fd: int, nbytes: int) -> None:
        mapped = mmap.mmap(fd, nbytes)
        keep_private(mapped)
        self._map: mmap.mmap | None = mapped
        self._process = os.getpid()
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)

    def populate(self, start: int, length: int, *, write: bool) -> None:
        """Faults pages in without holding the GIL. Raises CapacityError when the system has no memory for them."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = self.bytes.ctypes.data + start
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice) == 0:
            return
        code = ctypes.get_errno()
        raise CapacityError(
            "SW-202",
            what=f"{length} bytes of shared memory could not be populated",
            why=os.strerror(code) + (" (MADV_POPULATE_WRITE needs Linux 5.14)" if code == errno.EINVAL else ""),
            fix="lower `host`, or raise the memory limit of the well",
        )

    def close(self) -> None:
        """Unmaps; views of `bytes` that someone still holds keep the mapping until they are gone."""
        self.bytes = np.empty(0, np.uint8)
        held, self._map = self._map, None
        if held is not None and self._process == os.getpid():
            with contextlib.suppress(BufferError):  # the last view's death unmaps it
                held.close()


class SharedMemory:
    """A sealed memfd owned by the well, mapped here. It goes back to the system with `close`, or with the last
    reference."""

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise Unsupported(
                "SW-702",
                what="no shared memory for the arena",
                why="the system has no memfd_create",
                fix="use Linux 3.17 or newer",
            )
        self.nbytes = nbytes
        self.fd = -1
        try:
            self.fd = os.memfd_create("stepwell-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.mapping = Mapping(self.fd, nbytes)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise CapacityError(
                "SW-202",
                what=f"a slab of {nbytes} bytes could not be made",
                why=str(error),
                fix="lower `host`, or raise the memory limit of the well",
            ) from error
        self._close = weakref.finalize(self, os.close, self.fd)

    @property
    def bytes(self) -> Bytes:
        return self.mapping.bytes

    def populate(self, start: int, length: int) -> None:
        """Touches [start, start + length) for the first time, zero-filled. Blocks; raises CapacityError."""
        self.mapping.populate(start, length, write=True)

    def punch(self) -> None:
        """Gives all pages back to the system: late readers see zeros. Blocking."""
        libc = ctypes.CDLL(None, use_errno=True)
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        if libc.fallocate(self.fd, mode, ctypes.c_long(0), ctypes.c_long(self.nbytes)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Idempotent. Members' own mappings stay."""
        self.mapping.close()
        self._close()
        self.fd = -1


class Memory(Protocol):
    def make(self, nbytes: int) -> SharedMemory:
        """A new slab's memory, not yet populated. Raises CapacityError or Unsupported."""


class SystemMemory:
    """Memory as the kernel gives it."""

    def make(self, nbytes: int) -> SharedMemory:
        return SharedMemory(nbytes)
