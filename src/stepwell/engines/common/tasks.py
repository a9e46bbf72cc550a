"""Tasks that a plan gives to a worker: loads, batches of saves, and compares.

Each of them is waited for: a load by the engine's scheduler, the lease of a save or a compare by the well. So a task is
recorded when its plan comes, before anything is done for it, and answered exactly once, when none of its copies runs:
as done as far as it came, and as failed for the rest. What raises in between costs what that task would have brought,
and no answer.

    recorded -- begun: a job copies ----------------> over -> answered
             '- skipped: its turn has passed --------^
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.common.plan import Compare, Load, Save, StepPlan
from stepwell.engines.paged.base import Copying, Mark
from stepwell.engines.paged.lane import Job

T = TypeVar("T")


class Handover(Generic[T]):
    """Gathers something until it is taken, as a whole and once: a `take` that raises has taken nothing."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._gathered = deque([new()])  # a second one is there only while the first is being taken

    @property
    def now(self) -> T:
        """The value being gathered, to which is added."""
        return self._gathered[0]

    def take(self) -> T:
        if len(self._gathered) == 1:
            self._gathered.append(self._new())
        return self._gathered.popleft()


@dataclass(eq=False)
class Task:
    """`hold`: of the slots that it copies from or to. `begun`: its copies. `answered`: to the well, perhaps by the job
    itself. `told`: all that waits for it has its answer. `distrusted`: pages that it copied from may have been written
    meanwhile."""

    job: Job | None = None
    hold: Hold | None = None
    begun: list[Copying] = field(default_factory=list)
    skipped: bool = False
    answered: bool = False
    told: bool = False
    distrusted: bool = False

    @property
    def idle(self) -> bool:
        """None of its copies runs."""
        return all(copying.done for copying in self.begun)

    @property
    def over(self) -> bool:
        """It is idle and will do nothing more."""
        return (self.skipped or (self.job is not None and self.job.over)) and self.idle

    def skip(self) -> None:
        """Keeps it from beginning, if it has not begun: its turn has passed."""
        self.skipped = self.job is None

    @contextmanager
    def holding(self, client: WorkerClient) -> Iterator[Hold]:
        """A hold for the task's slots. Views of slots must be gone when it ends; copies under way then keep the slots
        until they are done."""
        hold = self.hold = client.hold()
        try:
            yield hold
        finally:
            if self.idle:
                hold.close()


@dataclass(eq=False)
class LoadTask(Task):
    """`good`: how many leading blocks are in their pages, as the well has leased them. `seconds`: of copying. `bad`:
    where the pages of the others are gathered for the engine. `late`: why the others of a stream have not come; ""
    where they have failed otherwise. `unwanted`: nobody waits for its blocks any more."""

    load: Load = field(kw_only=True)
    good: int = 0
    seconds: float = 0.0
    bad: set[int] | None = None
    late: str = ""
    unwanted: bool = False


@dataclass(eq=False)
class SaveTask(Task):
    """A batch. `filled`: those whose slots have their bytes."""

    saves: list[Save] = field(kw_only=True)
    filled: list[Save] = field(default_factory=list)


@dataclass(eq=False)
class CompareTask(Task):
    """`errors`: each layer's, the largest of all blocks; none where they were not compared."""

    compare: Compare = field(kw_only=True)
    errors: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """A plan's tasks. `before`: right before its forward, once that is known. `fenced`: the forward is held back where
    it takes pages that copies under way still touch. `handled`: the exception that was handled before the forward."""

    plan: StepPlan
    loads: list[LoadTask]
    urgent: list[SaveTask]
    saves: list[SaveTask]
    compares: list[CompareTask]
    before: Mark | None = None
    fenced: bool = False
    handled: BaseException | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> Step:
        return cls(
            plan,
            [LoadTask(load=load) for load in plan.loads],
            [SaveTask(saves=plan.urgent)] if plan.urgent else [],
            [SaveTask(saves=plan.saves)] if plan.saves else [],
            [CompareTask(compare=compare) for compare in plan.compares],
        )

    @property
    def tasks(self) -> Iterator[Task]:
        yield from self.loads
        yield from self.urgent
        yield from self.saves
        yield from self.compares

    def leaving(self) -> Iterator[int]:
        """Pages that copies read which may still run."""
        for saved in (task for task in self.saves if not task.over):
            yield from (page for save in saved.saves for page in save.pages)
        for compared in (task for task in self.compares if not task.over):
            yield from (page for _, pages, _ in compared.compare.blocks for page in pages)
