"""What the system refuses a process of an engine that would reach its well: descriptors, memory, threads. It passes
without anybody's doing, so it is never taken for something that a person must set right first."""

from __future__ import annotations

import errno

from stepwell.errors import BackendDown

_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def passes(error: OSError) -> bool:
    return error.errno in _PASSING


def refusal(error: BaseException) -> BackendDown:
    """The error as a person is told of it."""
    return BackendDown(
        "SW-510",
        what="a process of this engine could not try to reach the well",
        why=f"{type(error).__name__}: {error}",
        fix="nothing if it passes, it is tried again within seconds; else raise this process's limits of open files "
        "(ulimit -n), threads and memory",
    )
