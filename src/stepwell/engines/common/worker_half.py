"""The half of an adapter that lives in each worker: executes the scheduler's plans and reports.

Loads start after the forward (their pages are not part of it), saves read pages that earlier steps completed. On CPU
the step itself copies, but for large loads; on a GPU copies run beside the forward that follows, which is held back
where it writes pages that are still being read (`StepPlan.fresh`). Streams go on beside later steps.

Every load is reported as received exactly once, whatever raises in here: a request whose load is never reported would
wait for ever. `tasks` says how. What a hook that raised has left undone is answered at the next step, and a request
whose load failed is received only after its bad pages were taken: the engine would take them for good.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.common.loads import Loads
from stepwell.engines.common.plan import Ref, Save, StepPlan, StepReport
from stepwell.engines.common.steps import MAX_STEPS
from stepwell.engines.common.tasks import CompareTask, Handover, LoadTask, SaveTask, Step, Task
from stepwell.engines.paged.base import Copies, Mark, Shard
from stepwell.engines.paged.lane import Job, Lane, OpenLane, Steps
from stepwell.io.memory import Bytes

log = logging.getLogger("stepwell")


@dataclass
class Received:
    """Requests whose loads are over, well or not, and those of them that the engine computes from the start."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """`shard`: number of the part of a block that this rank holds (its own rank by default). `writes`: of the ranks
    that hold it, this one saves it. `idle`: by cache group, bytes of a page in which this group keeps nothing; none at
    all where no group has any. `not_compared`: the same, and those of which two engines' pages may differ, for
    canaries. `zeroed_first`: the engine zeroes the pages that a step takes before it hands over the step's plan, so
    copies out of them hold back what comes after the step before. `by_request`: the engine is told which requests'
    loads have failed, and not which pages. `threaded`: threads wait for copies that run; without them that happens
    whenever something is taken from here. `report`: makes an empty report, of a class that the engine can carry. Jobs
    may run on threads; everything else is called by the engine's thread."""

    def __init__(
        self,
        rank: int,
        shard_bytes: int,
        copies: Copies,
        client: WorkerClient,
        *,
        shard: int | None = None,
        writes: bool = True,
        idle: Sequence[Sequence[slice]] = (),
        not_compared: Sequence[Sequence[slice]] = (),
        zeroed_first: bool = False,
        by_request: bool = False,
        threaded: bool = True,
        report: Callable[[], StepReport] = StepReport,
    ) -> None:
        self._rank = rank
        self._shard = rank if shard is None else shard
        self._writes = writes
        self._idle = idle
        self._not_compared = not_compared
        self._zeroed_first = zeroed_first
        self._by_request = by_request
        self._shard_bytes = shard_bytes
        self._copies = copies
        self._client = client
        self._asleep = False
        self._naps = 0
        self._plans: deque[StepPlan] = deque()  # that have come and are no steps yet
        self._steps: list[Step] = []  # with tasks that are not told yet; and the last one
        self._received: Handover[Received] = Handover(Received)
        self._bad_pages: Handover[set[int]] = Handover(set)
        self._report: Handover[StepReport] = Handover(report)
        self._forwards: deque[tuple[int, Mark, Mark]] = deque(maxlen=MAX_STEPS)  # not known yet how long they took
        self._loads = Loads(client, self._awake, self._shard, shard_bytes, self._answer)
        threaded_out = threaded and copies.overlaps
        self._out = Lane("stepwell-copy-out", threaded=threaded_out)  # has work only where copies overlap
        self._in = Lane("stepwell-copy", threaded=threaded)
        self._streams = OpenLane("stepwell-stream", threaded=threaded)
        client.stirred = self._streams.wake

    # hooks, in the order of a step ------------------------------------------------------------------------------------

    def before_forward(self, plan: StepPlan) -> None:
        """Copies pages that were taken back from a request, before the forward can write them."""
        step = self.accept(plan)
        try:
            step.before = self._copies.now()
            self._save(step.urgent, step.before, plan.naps)
        finally:
            self.fence(plan)

    def accept(self, plan: StepPlan) -> Step:
        """Records the plan: from here on all that it asks for is answered, whatever raises."""
        for step in self._steps:
            if step.plan is plan:
                return step
        if not any(known is plan for known in self._plans):
            self._plans.append(plan)
        return self._accept_all()

    def _accept_all(self) -> Step:
        """Makes steps of all recorded plans; returns the last one."""
        while self._plans:
            if not self._steps or self._steps[-1].plan is not self._plans[0]:
                self._steps.append(Step.of(self._plans[0]))
            self._plans.popleft()
        return self._steps[-1]

    def fence(self, plan: StepPlan) -> None:
        """Makes the forward wait for copies that touch pages which it takes. Idempotent. Where that fails, whatever is
        being copied out of pages counts as not copied."""
        try:
            step = self.accept(plan)
            step.handled = sys.exc_info()[1]
            if not step.fenced:
                self._copies.hold_back(range(self._copies.num_pages) if plan.any_page else plan.fresh)
                step.fenced = True
        except BaseException:
            self._distrust_copies()
            raise

    def _fence_next(self) -> None:
        """Makes whatever the engine hands over from here on wait for copies out of pages. Where that fails, they count
        as not copied."""
        try:
            self._copies.hold_back({page for step in self._steps for page in step.leaving()})
        except BaseException:
            self._distrust_copies()
            raise

    def _distrust_copies(self) -> None:
        """Marks copies out of pages as worthless: the forward may write these pages meanwhile."""
        for step in self._steps:
            for task in (*step.urgent, *step.saves, *step.compares):
                task.distrusted = True

    def start_loads(self, plan: StepPlan) -> None:
        """Comes right after the forward, since no load is a synchronous one. On a CPU the forward has ended then; on a
        GPU it has been handed over, and so has what may have been written to the loads' pages before."""
        step = self.accept(plan)
        after = self._copies.now()
        if step.before is not None:
            self._forwards.append((plan.step, step.before, after))
        room = self._copies.inline_bytes
        for task in step.loads:
            if task.load.limits is not None:
                self._begin(task, self._loads.stream(task, after), self._streams)
                continue
            room -= len(task.load.blocks) * self._shard_bytes
            self._begin(task, self._loads.load(task, after), None if room >= 0 else self._in)
        if plan.unwanted:
            self._give_up(plan.unwanted)

    def _give_up(self, transfers: Collection[int]) -> None:
        """Ends these streams, with what has come."""
        for task in (task for step in self._steps for task in step.loads if task.load.transfer in transfers):
            task.unwanted = True
        self._streams.wake()

    def end_of_step(self, plan: StepPlan) -> None:
        """Called from a `finally` too: a forward that raised has left half-written pages. What was being handled when
        the step began is another matter: an engine in the process of its user may be driven by a handler."""
        step = self.accept(plan)
        if not step.fenced:
            self._distrust_copies()
        raised = sys.exc_info()[1] is not step.handled
        for late in [*step.urgent, *(step.saves if raised else ())]:
            late.skip()  # was not asked for in time: its pages are written anew by now
        if not raised:
            self._report.now.done[plan.step] = 1
        after = step.before or self._copies.now()
        self._save(step.saves, after, plan.naps)
        for task in step.compares:
            self._begin(task, self._compare(task, after, plan.naps), self._out)
        if self._zeroed_first:
            self._fence_next()
        step.handled = None  # its frames are not kept longer than the step

    # while the engine sleeps its pages have no memory -----------------------------------------------------------------

    def sleep(self) -> None:
        """Returns when no copy touches a page any more. Until `wake_up` all that are asked for fail."""
        if not self._asleep:
            self._naps += 1
            self._asleep = True
        for lane in (self._out, self._in, self._streams):
            with suppress(Exception):
                lane.flush()
        for copying in [copying for step in self._steps for task in step.tasks for copying in task.begun]:
            with suppress(Exception):
                copying.wait()

    def wake_up(self) -> None:
        """The pages have memory again, with nothing in it. Plans made before the scheduler knows of that save
        nothing."""
        self._asleep = False

    def _awake(self, naps: int | None = None) -> Copies:
        """The copies. Raises RuntimeError where pages hold nothing. `naps`: how many of them the plan takes into
        account."""
        if self._asleep or (naps is not None and naps != self._naps):
            raise RuntimeError("the engine sleeps, or has slept since its pages were written")
        return self._copies

    # what the scheduler is told ---------------------------------------------------------------------------------------

    def take_received(self) -> Received:
        """Requests whose loads are over."""
        self._poll()
        return self._received.take()

    def take_bad_pages(self) -> set[int]:
        """Pages that loads did not fill, whose requests are received at a later step."""
        return self._bad_pages.take()

    def take_report(self) -> StepReport:
        self._report.now.naps = self._naps
        for _ in range(len(self._forwards)):
            step, before, after = self._forwards.popleft()
            if (seconds := after.seconds_after(before)) is None:
                self._forwards.append((step, before, after))
            else:
                self._report.now.seconds[step] = seconds
        return self._report.take()

    # answers ----------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._out.poll()
        self._in.poll()
        self._streams.poll()
        for step in self._steps:
            for task in step.tasks:
                if step is not self._steps[-1]:  # its hooks have been called
                    task.skip()
                if task.over and not task.told and self._bad_pages_known(task):
                    self._tell(task)
        self._steps = [step for step in self._steps[:-1] if not all(t.told for t in step.tasks)] + self._steps[-1:]

    def _bad_pages_known(self, task: Task) -> bool:
        """Whether the engine has taken the pages that this load did not fill, if there are any."""
        if self._by_request or not isinstance(task, LoadTask) or task.good == len(task.load.blocks):
            return True
        if task.bad is None:
            bad = self._bad_pages.now
            bad.update(page for *_, pages in task.load.blocks[task.good :] for page in pages)
            task.bad = bad
        return task.bad is not self._bad_pages.now

    def _tell(self, task: Task) -> None:
        """Reports the end of a task. After an exception it is called again at the next step."""
        if task.hold is not None:
            task.hold.close()
        if not task.answered:
            self._answer(task)
        report = self._report.now
        match task:
            case LoadTask(load=load, good=good):
                pages = sum(len(pages) for *_, pages in load.blocks[:good])
                report.recalled_bytes += pages * self._copies.page_bytes
                if task.late:
                    report.short.append((load.request, load.transfer, good, task.late, task.seconds))
                elif good < len(load.blocks):
                    report.failed.append((load.request, load.transfer, good))
                else:
                    report.loaded.append((load.request, load.transfer, task.seconds))
                received = self._received.now
                received.requests.add(load.request)
                if self._by_request and good < len(load.blocks):
                    received.failed.add(load.request)
            case SaveTask(filled=filled):
                report.spilled_bytes += len(filled) * self._shard_bytes
            case CompareTask(compare=compare, errors=errors):
                report.compared.append((self._rank, compare.transfer, errors))
        task.told = True

    def _answer(self, task: Task) -> None:
        """Ends the task's leases if none of its copies runs; otherwise they end when it is over. Ending a lease twice
        does no harm."""
        if not task.idle:
            return
        try:
            match task:
                case LoadTask(load=load):
                    self._client.recalled(load.session, load.transfers)
                case CompareTask(compare=compare):
                    self._client.recalled(compare.session, [compare.transfer])
                case SaveTask(saves=saves, filled=filled) if self._writes:
                    for session in {save.session for save in saves}:
                        leases = {save.lease for save in saves if save.session == session}
                        full = {save.lease for save in filled if save.session == session}
                        self._client.filled(session, sorted(full), sorted(leases - full))
            task.answered = True
        except Exception as error:  # noqa: BLE001 - tried once more; then the leases end with the session
            log.debug("the end of a copy was not acknowledged: %s", error)

    # copying ----------------------------------------------------------------------------------------------------------

    def _begin(self, task: Task, steps: Steps, lane: Lane | None) -> None:
        """Starts the task's job. Without a lane it is finished here. Otherwise the lane runs it: loads from their
        beginning, other tasks after their first copies have been handed over here. A task that has begun or was skipped
        is left alone."""
        if task.skipped or task.job is not None:
            return
        job = Job(steps)
        try:
            task.job = job
            if lane is None:
                job.finish()
                return
            if lane is self._out:
                job.advance()
            if not job.over:
                lane.put(job)
        except Exception as error:  # noqa: BLE001 - costs what this task would have brought, and no other anything
            log.debug("copies ended early: %s", error)
            job.close()

    def _save(self, tasks: Sequence[SaveTask], after: Mark, naps: int) -> None:
        for task in tasks:
            if self._writes:
                self._begin(task, self._spill(task, after, naps), self._out)

    def _spill(self, task: SaveTask, after: Mark, naps: int) -> Steps:
        filled: list[Save] = []
        try:
            with task.holding(self._client) as hold:
                shards: list[Shard] = []
                for save in task.saves:
                    try:
                        shards.append(Shard(hold.slot(save.session, *self._ref(save.refs)), 0, save.pages))
                        filled.append(save)
                    except Exception as error:  # noqa: BLE001 - one block less
                        log.debug("a block was not spilled: %s", error)
                try:
                    task.begun.append(self._awake(naps).gather(shards, after))
                finally:
                    shards.clear()  # views of slots: none may outlive the hold
                yield task.begun[-1]
                for save in filled if self._idle else ():
                    self._clear_idle(hold, save)
            task.filled = [] if task.distrusted else filled
        except Exception as error:  # noqa: BLE001 - a failed spill is a few blocks less, never an engine less
            log.debug("blocks were not spilled: %s", error)
        self._answer(task)

    def _clear_idle(self, hold: Hold, save: Save) -> None:
        """What lies in these bytes of a page is of other requests, which had the page before in another group."""
        slots, slot = hold.slot(save.session, *self._ref(save.refs))
        for idle in self._idle[save.group]:
            slots[slot].reshape(-1, self._copies.page_bytes)[:, idle] = 0

    def _compare(self, task: CompareTask, after: Mark, naps: int) -> Steps:
        """The steps of comparing a canary."""
        compare = task.compare
        errors: list[float] = []
        try:
            with task.holding(self._client) as hold:
                # All at once: its pages may be written anew by the next step, which waits for what is under way only.
                fetched = [self._awake(naps).fetch(pages, after) for _, pages, _ in compare.blocks]
                for (refs, _, group), (copying, fresh) in zip(compare.blocks, fetched, strict=True):
                    yield copying
                    more = self._errors(compare.session, self._ref(refs), fresh, hold, group)
                    errors = [max(pair) for pair in zip(errors, more, strict=True)] if errors else more
            task.errors = [] if task.distrusted else errors
        except Exception as error:  # noqa: BLE001 - one canary less
            log.debug("a canary was not compared: %s", error)
        self._answer(task)

    def _errors(self, session: int, ref: Ref, fresh: Bytes, hold: Hold, group: int) -> list[float]:
        """Errors of each layer of one block, whose slot is checked before it is read and afterwards. Raises
        IntegrityError."""
        stored = hold.slot(session, *ref).bytes.reshape(-1, self._copies.page_bytes)[: len(fresh)]
        for part in self._not_compared[group] if self._not_compared else ():
            fresh[:, part] = stored[:, part]
        errors = self._copies.errors(fresh, stored)
        self._client.verify(session, *ref)
        return errors

    def _ref(self, refs: Sequence[Ref]) -> Ref:
        return refs[self._shard]

    def close(self) -> None:
        """Ends the copying threads when they have done what they were given. Does not wait."""
        self._out.close()
        self._in.close()
        self._streams.close()
        self._copies.close()
