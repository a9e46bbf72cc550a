"""Copying with two threads, where the worker may use more than one processor.

One core reads memory at about half of what two do, and a recall's time is its copy's. The second thread is woken for
large copies only and sent to another processor than the first one's: where an engine's other processes spin, the system
would leave both on one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from stepwell.io.memory import Bytes


class Copy(NamedTuple):
    """to[...] = source"""

    to: Bytes
    source: Bytes


ALONE_BYTES = 32 << 20
"""Up to here one thread copies alone: the second one would save a millisecond or two, and where its processor is taken
by another process it can cost more, since its last piece is waited for."""

_libc = ctypes.CDLL(None)


class _Job:
    """Copies that the threads take from one iterator; taking is atomic under the GIL, copying releases it."""

    def __init__(self, copies: Iterator[Copy]) -> None:
        self.copies = copies
        self.error: Exception | None = None
        self._over = False
        self._helping = threading.Lock()

    def work(self) -> None:
        for to, source in self.copies:
            to[...] = source

    def help(self) -> None:
        """The second thread's part; nothing if the first one is through already."""
        with self._helping:
            if self._over:
                return
            try:
                self.work()
            except Exception as error:  # noqa: BLE001 - raised by `wait`, on the thread that wants the copy
                self.error = error

    def wait(self) -> None:
        """Returns when neither thread copies any more. Raises what the helper raised."""
        self._over = True
        with self._helping:
            pass  # a helper that begins from here on finds it over
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # with its traceback it would keep this frame, and through it the arrays


class Team:
    """Copies with a helper thread. Safe for several threads: the helper helps one after the other, or comes too
    late."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._helper: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards the two above

    def copy(self, copies: Sequence[Copy], nbytes: int) -> None:
        """Does these copies, of `nbytes` in all. None of them runs any more when it returns or raises."""
        job = _Job(iter(copies))
        if nbytes > ALONE_BYTES and self._send_elsewhere():
            self._jobs.put(job)
        try:
            job.work()
        finally:
            job.wait()

    def _send_elsewhere(self) -> bool:
        """Gives the helper the processors that this thread may use and does not at present. False: there is none, as
        where vLLM binds its workers to one each."""
        try:
            others = os.sched_getaffinity(0) - {_libc.sched_getcpu()}
            if not others:
                return False
            with self._lock:
                if self._closed:
                    return False  # its number may be another thread's by now
                if self._helper is None:
                    thread = threading.Thread(target=self._help, name="stepwell-copy-2", daemon=True)
                    thread.start()
                    self._helper = thread
                assert self._helper.native_id is not None  # it has started
                os.sched_setaffinity(self._helper.native_id, others)
        except (OSError, AttributeError, RuntimeError):  # a libc without sched_getcpu, no thread to be had
            return False
        return True

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.help()
            del job  # its views keep mappings alive

    def close(self) -> None:
        """Ends the helper when it has nothing left to do. Does not wait."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
