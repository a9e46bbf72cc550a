"""A process that is to end with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Makes the system send this signal when the *thread* that started this process ends. A parent that has ended
    before is not noticed: after a fork, compare `os.getppid()`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
