"""An executor whose disorder is drawn from one seed: the same seed and the same calls give the same run.

Jobs wait until `step` runs one of them, any of them; its completion waits in turn until `step` delivers it, in any
order, or never. For state machines whose guarantees must not depend on the order of their executor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from stepwell.io.executor import Done, Job

T = TypeVar("T")


class InjectedFailure(OSError):
    """A job failed by decision of the seed. It was not run."""


@dataclass(frozen=True, slots=True)
class JobFaults:
    """Probabilities, each of 0 to 1. fail: the job is not run and its completion carries InjectedFailure. drop: the
    completion never comes, as if the thread hung after the work. run_first: a step runs a job rather than delivering
    a completion, so higher means later and more disordered completions."""

    fail: float = 0.0
    drop: float = 0.0
    run_first: float = 0.5


class SeededExecutor:
    """An `Executor` that does nothing by itself. `faults` may be replaced at any time."""

    def __init__(self, seed: int, faults: JobFaults = JobFaults()) -> None:
        self.seed = seed
        self.faults = faults
        self._random = random.Random(seed)
        self._jobs: list[tuple[Job, Done]] = []
        self._ended: list[tuple[Done, BaseException | None]] = []
        self.dropped = 0

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.append((job, done))

    @property
    def pending(self) -> int:
        """Jobs not run and completions not delivered; dropped ones are neither."""
        return len(self._jobs) + len(self._ended)

    def step(self) -> bool:
        """Runs one job or delivers one completion. False: there is nothing to do."""
        if self._jobs and (not self._ended or self._random.random() < self.faults.run_first):
            self._run(*self._take(self._jobs))
        elif self._ended:
            done, error = self._take(self._ended)
            done(error)
        else:
            return False
        return True

    def drain(self, limit: int = 10_000) -> None:
        """Steps until nothing is left. Raises RuntimeError when jobs beget jobs for more than `limit` steps."""
        for _ in range(limit):
            if not self.step():
                return
        raise RuntimeError(f"still busy after {limit} steps (seed {self.seed})")

    def _take(self, waiting: list[T]) -> T:
        at = self._random.randrange(len(waiting))
        waiting[at], waiting[-1] = waiting[-1], waiting[at]
        return waiting.pop()

    def _run(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        if self._random.random() < self.faults.fail:
            error = InjectedFailure(f"injected (seed {self.seed})")
        else:
            try:
                job()
            except Exception as raised:  # noqa: BLE001 - an executor hands every failure to its caller
                error = raised
        if self._random.random() < self.faults.drop:
            self.dropped += 1
            return
        self._ended.append((done, error))
