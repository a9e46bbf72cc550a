"""Jobs that do something, wait for a copy, and do something more; and lanes that run them, one after the other or side
by side.

A job is over when its steps have ended, in whatever way: at their end, by an exception of theirs, or because they were
closed. An exception may also come from the caller at any point: a job then goes on from where it was, or is closed.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator

from stepwell.engines.paged.base import Copying

log = logging.getLogger("stepwell")

LOOK_S = 0.005
"""Seconds between two looks of a thread at jobs that can only look again."""

Steps = Generator[Copying | None, None, None]
"""Yields each copy that must be done before it goes on; in a lane of jobs that run side by side also None, where it can
only look again later. Waiting for a copy raises inside, at the `yield`."""


class Job:
    """Steps that wait for copies. Used by one thread at a time."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waits: Copying | None = None

    @property
    def over(self) -> bool:
        """None of its steps runs or will run. Safe to call from any thread."""
        return inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED

    def advance(self) -> None:
        """Runs it as far as it comes without waiting."""
        while not self.over and (self._waits is None or self._waits.done):
            self._resume()

    def look(self) -> None:
        """Runs it as far as it comes without waiting, and without looking twice."""
        if self._waits is None and not self.over:
            self._resume()
        while not self.over and self._waits is not None and self._waits.done:
            self._resume()

    def go_on(self) -> None:
        """Runs it to its next copy or look, after waiting for the copy that it was at."""
        if not self.over:
            self._resume()

    @property
    def copies(self) -> bool:
        """It is at a copy."""
        return self._waits is not None

    def finish(self) -> None:
        """Runs it to its end, waiting for each copy."""
        while not self.over:
            self._resume()

    def _resume(self) -> None:
        """Runs it to its next copy. Raises what its steps raise."""
        try:
            if self._waits is not None:
                self._waits.wait()
        except Exception as error:  # noqa: BLE001 - whose copy it is decides what a failure means
            self._waits = self._thrown(error)
        else:
            self._waits = next(self._steps, None)

    def _thrown(self, error: Exception) -> Copying | None:
        try:
            return self._steps.throw(error)
        except StopIteration:
            return None

    def close(self) -> None:
        """Ends its steps where they are. A job that another thread is running is left to that thread."""
        try:
            self._steps.close()
        except ValueError as error:
            log.debug("a job was not closed: %s", error)


def _tell(event: threading.Event) -> Steps:
    event.set()
    yield from ()


class Lane:
    """Jobs in the order in which they came, by a thread of their own; without one in `poll`, as far as their copies are
    done. A thread that has died of an exception is replaced."""

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self._name = name
        self._jobs: deque[Job] = deque()  # the first one is under way
        self._wake = threading.Event()
        self._closed = False
        self._thread = self._start() if threaded else None

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        return thread

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def poll(self) -> None:
        """Called now and then by the thread that puts jobs."""
        if self._thread is None:
            self._poll()
        elif self._jobs and not self._thread.is_alive():
            self._thread = self._start()

    def _poll(self) -> None:
        while self._jobs and self._over(self._jobs[0], Job.advance):
            self._jobs.popleft()

    def _run(self) -> None:
        while True:
            while self._jobs:
                self._over(self._jobs[0], Job.finish)
                self._jobs.popleft()
            if self._closed:
                return
            self._wake.wait()
            self._wake.clear()

    def flush(self) -> None:
        """Returns when all that it was given is over."""
        if self._thread is None:
            while self._jobs and self._over(self._jobs[0], Job.finish):
                self._jobs.popleft()
            return
        over = threading.Event()
        self.put(Job(_tell(over)))
        while not over.wait(0.1):
            self.poll()

    @staticmethod
    def _over(job: Job, go_on: Callable[[Job], None]) -> bool:
        """Runs the job with `go_on`; returns whether it is over."""
        try:
            go_on(job)
        except Exception:  # the others go on
            log.exception("stepwell: copies ended early")
            job.close()
        return job.over

    def close(self) -> None:
        """Ends the thread when it has done what it was given. Does not wait."""
        self._closed = True
        self._wake.set()


class OpenLane(Lane):
    """Jobs side by side, for those that mostly look for something: none keeps another from going on, but for the copy
    that it is at. All of them look when `wake` was called, and every LOOK_S."""

    def wake(self) -> None:
        """There may be something for a job to find. Any thread may call it."""
        self._wake.set()

    def _poll(self) -> None:
        self._round(Job.look)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            copies = self._round(Job.go_on)
            if self._closed and not self._jobs:
                return
            if not copies:
                self._wake.wait(LOOK_S if self._jobs else None)

    def _round(self, go_on: Callable[[Job], None]) -> bool:
        """Runs each job once with `go_on`. Whether any of them is at a copy."""
        for job in tuple(self._jobs):
            if self._over(job, go_on):
                self._jobs.remove(job)
        return any(job.copies for job in tuple(self._jobs))

    def flush(self) -> None:
        while self._jobs:
            if self._thread is None:
                self._round(Job.go_on)
            else:
                self._wake.set()
                self.poll()
                time.sleep(0.001)
