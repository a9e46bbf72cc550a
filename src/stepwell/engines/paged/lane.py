"""Who waits for copies that run: jobs that do something, wait for a copy, and do something more, one after the other.

A job is a generator of the copies that it must have done before it goes on. Nothing that it waits for may raise beyond
it: `wait` raises inside the job, at its `yield`, where it is dealt with.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator
from queue import SimpleQueue

from stepwell.engines.paged.base import Copying

log = logging.getLogger("stepwell")

Job = Generator[Copying, None, None]


def advance(job: Job, copying: Copying | None = None) -> Copying | None:
    """Runs the job as far as it comes without waiting: the copy that it waits for, or None when it is over. `copying`:
    what it has waited for until now, and is done; None: it is yet to begin."""
    try:
        copying = next(job) if copying is None else _resume(job, copying)
        while copying.done:
            copying = _resume(job, copying)
    except StopIteration:
        return None
    return copying


def finish(job: Job, copying: Copying | None = None) -> None:
    """Runs the job to its end, waiting for each copy."""
    try:
        copying = next(job) if copying is None else copying
        while True:
            copying = _resume(job, copying)
    except StopIteration:
        pass


def _resume(job: Job, copying: Copying) -> Copying:
    """Waits, and lets the job go on to its next copy. Raises StopIteration at its end."""
    try:
        copying.wait()
    except Exception as error:  # noqa: BLE001 - whose copy it is decides what a failure means
        return job.throw(error)
    return next(job)


class Lane:
    """Jobs in the order in which they came, by a thread of their own; without one in `poll`, as far as their copies are
    done."""

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self._jobs: SimpleQueue[tuple[Job, Copying | None] | None] | None = SimpleQueue() if threaded else None
        self._polled: deque[tuple[Job, Copying | None]] = deque()
        if self._jobs is not None:
            threading.Thread(target=self._run, args=(self._jobs,), name=name, daemon=True).start()

    def put(self, job: Job, copying: Copying | None = None) -> None:
        """A job that waits for `copying`, or is yet to begin."""
        if self._jobs is not None:
            self._jobs.put((job, copying))
        else:
            self._polled.append((job, copying))

    def poll(self) -> None:
        """Without a thread: goes on with what need not wait."""
        while self._polled:
            job, copying = self._polled.popleft()
            if copying is not None and not copying.done:
                self._polled.appendleft((job, copying))
                return
            if (waits := advance(job, copying)) is not None:
                self._polled.appendleft((job, waits))
                return

    @staticmethod
    def _run(jobs: SimpleQueue[tuple[Job, Copying | None] | None]) -> None:
        while (item := jobs.get()) is not None:
            job, copying = item
            try:
                finish(job, copying)
            except Exception:  # a job that raises has reported what it could; the others go on
                log.exception("stepwell: a copy was not reported")
            del item, job, copying  # they keep slots alive

    def close(self) -> None:
        """Ends the thread when it has done what it was given. Does not wait."""
        if self._jobs is not None:
            self._jobs.put(None)
