"""An injected executor of blocking work: threads in the well, a seeded order in tests.

A state machine submits jobs and gets their completions on its own thread; it never waits and needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Executor(Protocol):
    def submit(self, job: Job, done: Done) -> None:
        """Runs `job` elsewhere, where it may block, and then `done` on the owner's thread, never inside this call.
        `done` gets the job's exception, or None. Jobs may run in any order and at the same time. Does not block and has
        no bound of its own: the caller limits the number of jobs."""
