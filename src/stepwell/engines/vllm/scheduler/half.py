"""The half of the connector that lives beside vLLM's scheduler: decides what to recall and what to spill.

A block's way out:  planned in step N -> slots reserved while N runs -> N confirmed by all ranks -> copied in step N+1
A request's way in: asked when it arrives -> offered when the scheduler asks -> loads planned at its allocation

`spills` and `recalls` are these two ways, `live` what is known of each request. Here hooks come in, in any order and
number (facts are in docs/design/vllm.md), and a plan is made of each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.adapters import Adapters
from stepwell.engines.common.canaries import Canaries
from stepwell.engines.common.counts import Tally
from stepwell.engines.common.plan import Shape, StepPlan, StepReport
from stepwell.engines.common.requests import Tracked
from stepwell.engines.common.steps import Computes, Steps, StepTimes
from stepwell.engines.common.tasks import Handover
from stepwell.engines.vllm.scheduler.live import LiveRequests, Trouble
from stepwell.engines.vllm.scheduler.recalls import EngineRecalls
from stepwell.engines.vllm.scheduler.requests import computed_by, fresh_pages
from stepwell.engines.vllm.scheduler.spills import EngineSpills


class SchedulerHalf:
    """`new_plan` makes an empty plan of this number, of a class that the engine can carry."""

    def __init__(
        self,
        shape: Shape,
        client: SchedulerClient,
        trouble: Trouble,
        tally: Tally | None = None,
        canaries: Canaries | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        new_plan: Callable[[int], StepPlan] = StepPlan,
        *,
        zeroed_first: bool = False,
    ) -> None:
        self._shape = shape
        self._client = client
        self._tally = tally or Tally()
        self._canaries = canaries or Canaries(shape, client)
        numbers = count(1)
        self._plan: Handover[StepPlan] = Handover(lambda: new_plan(next(numbers)))  # of the next step
        self.live = LiveRequests(shape, client, trouble, self._canaries, adapters, clock)
        self._recalls = EngineRecalls(self.live, self._plan, shape, client, self._tally, self._canaries)
        self._spills = EngineSpills(self.live, self._plan, shape, client, self._canaries, zeroed_first=zeroed_first)
        self._begun = 0  # the step that was planned last
        self._steps = Steps(shape.world)
        self._times = StepTimes()
        self._restarted: set[str] = set()  # since the last plan
        self._naps = 0

    # a request arrives and asks ---------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        tracked = self.live.track(request)
        if tracked.chain is not None and not request.skip_reading_prefix_cache:
            self._recalls.ask(tracked, tracked.chain)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that can be recalled now; None: ask again."""
        tracked = self.live.track(request)
        if tracked.chain is None or not self.live.trusted or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.tables:
            self._restart(tracked)
        return self._recalls.matched(tracked, computed)

    def _restart(self, tracked: Tracked) -> None:
        """Starts a request again that was preempted, or whose load brought nothing: it will have other pages."""
        self._spills.hurry_out(tracked)
        self.live.end_ask(tracked)
        self._restarted.add(tracked.request.request_id)
        self.live.begin_again(tracked)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """The request has its pages, by cache group; `external` tokens of them are to be recalled (0: none, or known
        already). If this raises, the caller must `refuse` them: the request is parked until its load is reported."""
        for table in tables:
            self._plan.now.fresh += table
        self._recalls.allocated(self.live.track(request), tables, external)

    def sources(self, request: Any, external: int) -> dict[str, int]:
        """The tokens that the request was allocated pages for just now, by the tier that they were in."""
        return self._recalls.sources(self.live.track(request), external)

    def refuse(self, request_id: str, tables: Sequence[Sequence[int]], external: int) -> None:
        """Lets a recall fail that could not be planned, and ends its lease. A parked request's table ends with what it
        waits for."""
        self._recalls.refuse(request_id, tables, external)

    # a step is planned ------------------------------------------------------------------------------------------------

    def plan(self, out: Any) -> StepPlan:
        """The plan of this step. Called once a step, also for empty ones. If this raises, the caller must take the plan
        `as_it_is`: one that is lost would leave requests waiting for ever."""
        plan = self._plan.now
        if plan.step == self._begun:
            # The plan of the last step could not be had: it comes now, too late for copies out of its pages. Their
            # leases end with the session.
            plan.urgent, plan.saves, plan.compares = [], [], []
        self._begun = plan.step
        plan.fresh += fresh_pages(out)
        self._spills.overtaken(plan.fresh)
        self._observe(plan.step, out)
        self._times.begin(plan.step, computed_by(out))
        self._spills.taken(plan.fresh)
        self._spills.collect(plan)
        plan.unwanted = self._recalls.unwanted
        self._client.report(idle=not self.live.known)
        return self._taken()

    def plan_as_it_is(self) -> StepPlan:
        """The plan of a step that raised while it was planned. Page tables may have got out of step with the engine's:
        all requests go on without stepwell."""
        self._plan.now.any_page = True
        self.live.drop_all()
        return self._taken()

    def _taken(self) -> StepPlan:
        self._plan.now.compares += self._canaries.take_given_up()
        self._plan.now.naps = self._naps
        self._spills.room.next_step()
        return self._plan.take()

    def _observe(self, number: int, out: Any) -> None:
        for request_id in out.preempted_req_ids or ():
            tracked = self.live.known.get(request_id)
            if tracked is not None and tracked.tables and request_id not in self._restarted:
                with self.live.apart(request_id):
                    self._restart(tracked)
        self._restarted.clear()
        computes: list[Computes] = []
        for new in out.scheduled_new_reqs:
            if (tracked := self.live.known.get(new.req_id)) is not None:
                tracked.tables = []
            self._scheduled(new.req_id, new.block_ids, new.num_computed_tokens, out, computes)
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self.live.known.get(request_id)
            if tracked is not None and request_id in cached.resumed_req_ids:
                tracked.tables = []  # what comes are its whole tables
            self._scheduled(request_id, cached.new_block_ids[i], cached.num_computed_tokens[i], out, computes)
        self._steps.begin(number, computes)
        for request_id in out.finished_req_ids:
            tracked = self.live.known.get(request_id)  # perhaps of a new request with this id
            if tracked is not None and request_id not in self.live.lingering and tracked.request.is_finished():
                with self.live.apart(request_id):
                    self.live.forget(request_id)

    def _scheduled(self, request_id: str, more: Any, computed: int, out: Any, computes: list[Computes]) -> None:
        """`more`: pages by KV group that are appended to the request's table, or None."""
        tracked = self.live.known.get(request_id)
        if tracked is None:
            return
        if more:
            tracked.tables = tracked.tables or [[] for _ in more]
            pages = tracked.tables[0]
            before, hit = len(pages), -(-computed // self._shape.page)
            for table, pages_of_group in zip(tracked.tables, more, strict=True):
                table.extend(pages_of_group)
            suspect = self.live.suspect
            if suspect:
                suspect.difference_update(pages[max(before, hit) :])  # are written anew
                if before < hit and not suspect.isdisjoint(pages[:hit]):
                    self.live.mute(tracked)
        with self.live.apart(request_id):
            self._foresee(tracked, request_id, computed, out.num_scheduled_tokens[request_id], computes)

    def _foresee(
        self, tracked: Tracked, request_id: str, computed: int, scheduled: int, computes: list[Computes]
    ) -> None:
        """Notes what the step computes and reserves slots for the blocks that it completes. Tokens that are drafted are
        not computed by it: which of them are the request's is known when it has ended, and KV of the others is written
        anew by later steps."""
        chain = tracked.chain
        if chain is None:
            return
        if not tracked.admitted:
            self._recalls.admitted(tracked)
        tracked.ends = tracked.ends[1], computed + scheduled
        after = min(computed + scheduled, tracked.request.num_tokens)
        computes.append(Computes(request_id, tracked.life, after, scheduled))
        self._canaries.foresees(tracked, after)
        self._spills.reserve(request_id, tracked, chain, computed, after)

    # a step has ended -------------------------------------------------------------------------------------------------

    def not_loaded(self, pages: Collection[int]) -> None:
        """Takes note of pages that could not be loaded, by whichever connector. A step's output names them before the
        step is confirmed."""
        self._spills.not_loaded(pages)

    def stepped(self, report: StepReport) -> None:
        """Takes a report of workers on steps that they ended, of all ranks together or of one after the other."""
        if report.naps > self._naps:
            self.live.slept()
            self._naps = report.naps  # plans that do not know of it save nothing, until all is given up
        for request_id, transfer, bad in report.failed:
            with self.live.apart(request_id):
                self._recalls.failed(request_id, transfer, bad)
        for request_id, transfer, came, reason, copy_s in report.short:
            with self.live.apart(request_id):
                self._recalls.fell_short(request_id, transfer, came, reason, copy_s)
        for request_id, transfer in report.ended:
            with self.live.apart(request_id):
                self._recalls.reported(transfer)
        for request_id, life, after, tokens in self._steps.ended(report.done):
            self._spills.room.computed(tokens)
            tracked = self.live.known.get(request_id)
            if tracked is not None and tracked.life == life:
                tracked.confirmed = max(tracked.confirmed, after)
        for rank, transfer, errors in report.compared:
            self._canaries.compared(rank, transfer, errors)
        self._tally.copied(report)
        self._client.timed(self._times.ended(report.seconds), self._recalls.copies(report))
        self._recalls.loaded(report)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request's receipt. Its pages are the engine's again."""
        return self.live.ended(request)

    # the rest ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begins a new epoch, as the weights may have changed: blocks of before are never found again. If this raises,
        nothing is recalled or spilled until it was called again, and has ended well."""
        self.live.reset()

    def drop(self, request_id: str) -> None:
        """Leaves this request without stepwell, after an exception. Raises nothing."""
        self.live.drop(request_id)

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping."""
        plan = self._plan.now
        return bool(self.live.lingering or plan.loads or plan.urgent or self._canaries.waits)

    @property
    def tracked(self) -> int:
        return len(self.live.known)
