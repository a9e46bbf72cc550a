"""A server that works on several jobs at a time while others wait: a GPU that computes prompts, a drive that is
read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from stepwell.simulate.fleet.clock import EventClock

FASTEST: Final = 1e18
"""Rate that stands for no limit, in work a second: infinities do not add up."""


class ServerJob:
    """A job. `work`: what is left to do while it is served; before that, the expected work."""

    __slots__ = ("begin", "done", "lost", "work")

    def __init__(
        self,
        work: float,
        done: Callable[[], None],
        begin: Callable[[], float] | None,
        lost: Callable[[], None] | None,
    ) -> None:
        self.work = work
        self.done = done
        self.begin = begin
        self.lost = lost


class SharedServer:
    """The first `slots` jobs in line share `rate` units of work a second, none more than `most`; the others wait. With
    one slot that is first come, first served."""

    def __init__(self, clock: EventClock, rate: float, slots: int = 1, most: float = math.inf) -> None:
        self._clock = clock
        self._rate = min(rate, FASTEST)
        self._slots = slots
        self._most = most
        self._line: deque[ServerJob] = deque()
        self._served: list[ServerJob] = []
        self._since = 0.0
        self._turn = 0  # an end that was foreseen in an earlier turn is void

    @property
    def outstanding(self) -> float:
        """Work of all jobs that have not ended."""
        self._settle()
        return sum(job.work for job in self._served) + sum(job.work for job in self._line)

    def submit(
        self,
        work: float,
        done: Callable[[], None],
        *,
        begin: Callable[[], float] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> ServerJob:
        """`begin()` is called when the job's turn comes, and returns its amount of work. In the end either `done` is
        called or, if the server fails, `lost`."""
        job = ServerJob(work, done, begin, lost)
        self._settle()
        self._line.append(job)
        self._go_on()
        return job

    def drop(self, job: ServerJob) -> float:
        """Ends a job that has not ended, without a call. Returns the work that was left."""
        self._settle()
        (self._served if job in self._served else self._line).remove(job)
        self._go_on()
        return job.work

    def run_at(self, rate: float) -> None:
        """Sets the rate."""
        self._settle()
        self._rate = rate
        self._go_on()

    def fail(self) -> None:
        """Loses all jobs."""
        lost = [*self._served, *self._line]
        self._served.clear()
        self._line.clear()
        self._turn += 1
        for job in lost:
            if job.lost is not None:
                job.lost()

    def _share(self) -> float:
        return min(self._most, self._rate / len(self._served))

    def _settle(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if self._served and elapsed:
            did = elapsed * self._share()
            for job in self._served:
                job.work = max(0.0, job.work - did)

    def _go_on(self) -> None:
        while self._line and len(self._served) < self._slots:
            job = self._line.popleft()
            if job.begin is not None:
                job.work = job.begin()
            self._served.append(job)
        self._turn += 1
        if self._served:
            turn, next_ = self._turn, min(self._served, key=lambda job: job.work)
            self._clock.after(next_.work / self._share(), lambda: self._end(turn, next_))

    def _end(self, turn: int, job: ServerJob) -> None:
        if turn != self._turn:
            return
        self._settle()
        self._served.remove(job)
        self._go_on()
        job.done()
