"""Memory for keys: a few pages of their own, locked (never swapped) where the system allows it, left out of core dumps,
and zeroed key by key once a key is no longer referenced.

Some copies lie elsewhere: AES key schedules in OpenSSL's heap while a frame is made or opened, which OpenSSL cleanses
afterwards, and the key of block ids in BLAKE3's state for as long as a session names blocks. `io.process.dumps` keeps
them out of dumps, with all other memory of a well. Forked children inherit a copy, which is not locked.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref

KEY_BYTES = 32
_MADV_DONTDUMP = 16
_libc = ctypes.CDLL(None, use_errno=True)
_IN_BYTES = bytes.__basicsize__ - 1  # where CPython keeps the content of a bytes object; the last byte counted is a NUL


class Locker:
    """Cells of 32 bytes, for any thread. Grows by a page when all are taken."""

    def __init__(self) -> None:
        self.locked = True
        """The system has locked every page so far."""
        self._free: list[memoryview] = []

    def keep(self, secret: bytes | bytearray) -> memoryview:
        """A read-only view of a copy of `secret`, 32 bytes. It is zeroed when the view is garbage, and not before, so
        that a thread that still runs when the process ends never seals with zeros."""
        try:
            cell = self._free.pop()
        except IndexError:
            cell = self._grow()
        cell[:] = secret
        view = cell.toreadonly()
        weakref.finalize(view, self._give_back, cell).atexit = False
        return view

    def take(self, secret: bytes | bytearray) -> memoryview:
        """Does as `keep` and wipes `secret`, an object that only the caller has."""
        view = self.keep(secret)
        wipe(secret)
        return view

    def _give_back(self, cell: memoryview) -> None:
        cell[:] = bytes(KEY_BYTES)
        self._free.append(cell)

    def _grow(self) -> memoryview:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_MADV_DONTDUMP)
        whole = memoryview(page)
        self.locked = self.locked and try_lock(whole)
        cells = [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]
        self._free.extend(cells[1:])
        return cells[0]


cells = Locker()
"""All keys of this process."""


def try_lock(memory: memoryview) -> bool:
    """Locks whole pages, so that they are never swapped. False: the system does not allow it, as in some containers."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return bool(_libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(memory))) == 0)


def may_lock() -> bool:
    """Whether a page can be locked here: tries it on one that is given back."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page, memoryview(page) as view:
        return try_lock(view)


def lock_limit() -> int:
    """RLIMIT_MEMLOCK in bytes; -1 for none."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def wipe(secret: bytes | bytearray) -> None:
    """Zeroes the content of an object that is not used again: one that a library returned and only the caller has. Not
    for literals or arguments, whose other holders would see zeros."""
    if isinstance(secret, bytearray):
        secret[:] = bytes(len(secret))
    elif len(secret) > 1:  # shorter ones are shared by the whole interpreter
        ctypes.memset(id(secret) + _IN_BYTES, 0, len(secret))
