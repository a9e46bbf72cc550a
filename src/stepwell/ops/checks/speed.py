"""Speed of a directory: one unnamed temporary file is written and read past the page cache.

Runs in a thread of its own, because a hung device blocks its caller, and nothing can end that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepwell.io import staging

FILE_BYTES = 64 << 20
_PIECE = 4 << 20
_ALIGNED = 4096
_PHASE_SECONDS = 1.5
PATIENCE_SECONDS = 2 * _PHASE_SECONDS + 2.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds in 10^9 bytes a second, of a new file, one request of 4 MiB at a time. `direct`: O_DIRECT works here."""

    direct: bool
    write_gb_s: float
    read_gb_s: float


class Hung(Exception):
    """The directory did not answer in time; a thread of ours still waits for it."""


def measure(directory: Path) -> Speed:
    """Writes at most 64 MiB for at most 1.5 s and reads them for as long. Raises OSError, and Hung after 5 s.

    Without O_DIRECT the same is done through the page cache, with the write's sync counted as writing.
    """
    results: list[Speed | OSError] = []

    def job() -> None:
        try:
            results.append(_measure(directory))
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=job, daemon=True, name="stepwell-doctor")
    thread.start()
    thread.join(PATIENCE_SECONDS)
    if not results:
        raise Hung(f"{directory} did not answer within {PATIENCE_SECONDS:g} s")
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def _measure(directory: Path) -> Speed:
    with unnamed(directory) as fd:
        buffer = staging.make(_PIECE)
        buffer[:] = np.frombuffer(os.urandom(_PIECE), np.uint8)  # nothing that a filesystem could compress
        direct = _made_direct(fd, buffer.data[:_ALIGNED])
        started, written = time.perf_counter(), 0
        while written < FILE_BYTES and (written == 0 or time.perf_counter() - started < _PHASE_SECONDS):
            written += os.pwrite(fd, buffer.data, written)
        if not direct:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        write_gb_s = written / (time.perf_counter() - started) / 1e9
        started, read = time.perf_counter(), 0
        while read < written and (read == 0 or time.perf_counter() - started < _PHASE_SECONDS):
            got = os.preadv(fd, [buffer.data], read)
            if got == 0:
                raise OSError(errno.EIO, "a file that was just written is shorter than what was written")
            read += got
        return Speed(direct, write_gb_s, read / (time.perf_counter() - started) / 1e9)


def _made_direct(fd: int, aligned: memoryview) -> bool:
    """Makes `fd` bypass the page cache, if its filesystem can: some say no at once, some only when asked for bytes."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if os.pwrite(fd, aligned, 0) == os.preadv(fd, [aligned], 0) == _ALIGNED:
            return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


@contextlib.contextmanager
def unnamed(directory: Path) -> Iterator[int]:
    """A file in `directory` that has no name, so that nothing is left behind however this ends. Raises OSError."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        fd, name = tempfile.mkstemp(prefix=".stepwell-doctor-", dir=directory)  # filesystems without O_TMPFILE
        os.unlink(name)
    try:
        yield fd
    finally:
        os.close(fd)
