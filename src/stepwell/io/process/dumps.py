"""Core dumps: a process that holds plain KV and keys makes none, and a forced one has nothing of its memory.

There are three locks, because each has a way around it. The core limit does not hold for dumps that the kernel writes
into a pipe (core(5)). A process that is not dumpable stops those too, and debuggers of the same user, but not root's.
An empty coredump filter leaves registers and file names, but no memory, in a dump that root takes with gcore or that is
taken after the others were switched back on. Tools that read the memory itself (root, with /proc/PID/mem or `gcore -a`)
cannot be stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

FILTER = Path("/proc/self/coredump_filter")
_PR_SET_DUMPABLE = 4
_ZEROS = bytearray(1024)


def forbid() -> None:
    """Forbids dumps of this process and those that it forks, until they run another program (the filter and the limit:
    for ever). To be called before a key is read. On a kernel without the filter the other two locks remain."""
    with contextlib.suppress(OSError):
        FILTER.write_text("0")  # first: what is not dumpable may not write there
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def clear_registers() -> None:
    """Zeroes the vector registers of a thread that has worked with a key or with KV, before it waits: they keep the
    bytes that were last copied through them, and are in every dump (measured: a waiting well had the key of block ids
    in them). A kilobyte of zeros is copied, which is enough for the C library to use all of these registers. 0.1 us.
    Best effort, and of no use for a thread that is at work."""
    bytes(_ZEROS)
