"""Core dumps: none of a process that holds plain KV and keys, and nothing of its memory in one that is forced.

Three locks, because each has a way around it. The core limit does not hold for dumps that the kernel writes into a
pipe (core(5)); not being dumpable stops those too, and debuggers of the same user, but not root's; and an empty
coredump filter leaves a dump that root takes with gcore, or that is taken because somebody has switched the others back
on, with registers and names of files but with no memory. What reads the memory itself (root, with /proc/PID/mem or
`gcore -a`) cannot be kept from it.
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
    """For this process and those that it forks, until they run another program (the filter and the limit: for ever).
    To be called before a key is read. On a kernel without the filter the other two remain."""
    with contextlib.suppress(OSError):
        FILTER.write_text("0")  # first: what is not dumpable may not write there
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def clear_registers() -> None:
    """For a thread that has worked with a key or with KV, before it waits: vector registers keep what was last copied
    through them, and are in every dump (measured: a well that waited had the key of block ids in them). Zeros take its
    place; a kilobyte is what the C library copies with all of these registers. 0.1 us; does what it can, guarantees
    nothing, and does nothing for a thread that is at work."""
    bytes(_ZEROS)
