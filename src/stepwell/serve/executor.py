"""The well's executor: a few threads that run what may block, and a wake-up for the one thread that owns the state.

Not `concurrent.futures`, whose threads are joined when the interpreter exits: a thread that is stuck on a hung device
cannot be killed and must not keep the well from ending. Jobs are calls that release the GIL (populate, punch, I/O), not
Python loops.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections import deque
from queue import SimpleQueue

from stepwell.io.clock import Clock
from stepwell.io.executor import Done, Job
from stepwell.io.process.dumps import clear_registers

_LONGEST_S = 1e6  # poll knows 24 days


class Wakeup:
    """Ends the wait of a selector from any thread or signal handler. `fileno` becomes readable."""

    def __init__(self) -> None:
        # A socket pair, not an eventfd: `signal.set_wakeup_fd` writes single bytes.
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    @property
    def signal_fd(self) -> int:
        """The descriptor to give to `signal.set_wakeup_fd`."""
        return self._write.fileno()

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except BlockingIOError:
            pass  # full: the reader has not woken up yet and will
        except OSError:
            pass  # closed: there is no waiter any more

    def wait(self, seconds: float) -> None:
        """Waits until it is woken, at most so many seconds and 11 days, and clears it. `select` would know only 1,024
        descriptors."""
        waiting = select.poll()
        waiting.register(self._read, select.POLLIN)
        waiting.poll(1000 * min(seconds, _LONGEST_S))
        self.clear()

    def clear(self) -> None:
        try:
            while self._read.recv(4096):
                pass
        except OSError:
            pass  # nothing more to read

    def close(self) -> None:
        self._read.close()
        self._write.close()


class ThreadExecutor:
    """An `Executor` whose owner calls `complete` whenever `wakeup` was woken. `nice`: how much its threads yield to
    others when processors are busy, as nice(1) has it. Raises OSError EAGAIN where the system gives no thread."""

    def __init__(self, wakeup: Wakeup, threads: int = 2, *, nice: int = 0) -> None:
        self._wakeup = wakeup
        self._nice = nice
        self._jobs: SimpleQueue[tuple[Job, Done]] = SimpleQueue()
        self._ended: deque[tuple[Done, BaseException | None]] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"stepwell-job-{number}", daemon=True) for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # all that Python says
            raise OSError(errno.EAGAIN, str(error)) from error

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.put((job, done))

    def complete(self, clock: Clock, until: float) -> bool:
        """Calls the completions of ended jobs, on the owner's thread, at least one and no new one after `until`.

        True: more are waiting.
        """
        while self._ended:
            done, error = self._ended.popleft()
            done(error)
            if clock.now() >= until:
                break
        return bool(self._ended)

    def close(self, seconds: float) -> bool:
        """Starts no further job and waits for the running ones. False: one is stuck and will not be waited for."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put((lambda: None, lambda _: None))
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        os.nice(self._nice)  # of this thread alone
        while not self._closed:
            job, done = self._jobs.get()
            if self._closed:
                return
            error: BaseException | None = None
            try:
                job()
            except BaseException as raised:  # noqa: BLE001 - carried to the owner, who decides
                error = raised
            self._ended.append((done, error))
            del job, done, error  # an idle thread keeps no memory alive
            clear_registers()  # nor pieces of keys and KV
            self._wakeup.wake()
