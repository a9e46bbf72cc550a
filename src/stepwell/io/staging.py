"""Private buffers that storage reads and writes: 2 MiB-aligned, in huge pages, touched once and used again.

Shared memory gets no huge pages by default, and O_DIRECT into 4 KiB pages costs five to eight times the CPU (measured;
docs/design/format.md). One buffer belongs to one job while it runs. Not inherited by forks, not in core dumps.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import numpy as np

from stepwell.io.memory import Bytes, keep_private

HUGE, PAGE = 2 << 20, 4096
_MADV_HUGEPAGE = 14


class Staging:
    """Lends buffers of `nbytes`, to any thread. As many exist as were ever in use together: its users bound that."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // HUGE) * HUGE
        self._idle: SimpleQueue[Bytes | None] = SimpleQueue()
        self.made = 0

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[Bytes]:
        """A buffer of at least `nbytes`. One that was too small for its borrower is replaced by one that is not."""
        try:
            buffer = self._idle.get_nowait()
        except Empty:
            buffer = None
        if buffer is None or len(buffer) < nbytes:
            buffer = make(max(nbytes, self.nbytes))
            self.made += 1
        try:
            yield buffer
        finally:
            self._idle.put(buffer)


def make(nbytes: int) -> Bytes:
    """A buffer of its own mapping, aligned to 2 MiB and populated; freed with its last view."""
    whole = -(-nbytes // HUGE) * HUGE
    mapped = mmap.mmap(-1, whole + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        mapped.madvise(_MADV_HUGEPAGE)
    keep_private(mapped)
    everything = np.frombuffer(mapped, np.uint8)
    buffer = everything[-everything.ctypes.data % HUGE :][:whole]
    buffer[::PAGE] = 0
    return buffer
