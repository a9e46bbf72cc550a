"""A small serving engine on paged KV: both halves of the vLLM adapter over a real well, called in vLLM's order.

    schedule   matched -> pages -> allocated, for each that waits; running ones first; `plan` once a step
    execute    before_forward -> forward -> start_loads -> end_of_step -> what the worker reports
    settle     tokens are read, requests end (`finished`), then `stepped`, then received

With `ahead` step N+1 is scheduled and handed over before the tokens of step N are read, as vLLM does on CUDA. Scheduler
and worker share this thread. What the hooks take of it is counted, since in vLLM it would be other processes' time.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from lab.bench.gpu.engine.compute import Compute, Sampled, Work
from lab.bench.gpu.engine.halves import Halves
from lab.bench.gpu.engine.kv import Kv
from lab.bench.gpu.engine.pool import PagePool, prefixes
from lab.bench.gpu.engine.request import Request
from lab.bench.halves.scheduled import NewRequest, Output
from stepwell.engines.common.plan import StepReport

T = TypeVar("T")
PATIENCE_S = 120.0
IDLE_S = 0.0002
"""Slept after a step that computed nothing, so that the threads that copy get the interpreter."""


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Live:
    """A request and what the engine knows of it. `output`: tokens that it wants; with 0 it ends when its prompt's KV is
    there, with None it stays with that until it is aborted. `dry`: nothing is computed for it, only its pages are dealt
    with. `ahead`: its tokens that are under way. `filled_s`: from its arrival until its recall was reported."""

    request: Request
    output: int | None
    dry: bool
    prompt: int
    arrived: float
    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    ahead: int = 0
    loading: int = 0
    admitted: bool = False
    seen: bool = False
    aborted: bool = False
    filled_s: float = 0.0
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def tokens(self) -> list[int]:
        """Of the output."""
        return self.request.all_token_ids[self.prompt :]

    @property
    def done(self) -> bool:
        return self.phase is Phase.ENDED


@dataclass(slots=True)
class Step:
    """One that was handed over. `rows`: requests, and how many tokens of each are computed when it has ended."""

    rows: list[tuple[Live, int]]
    sampled: Sampled
    report: StepReport | None
    received: set[str]
    bad: set[int]


class Engine:
    """`budget`: tokens that a step computes at most. `poisoned`: pages are overwritten when they are taken to be
    computed into, in the order of the device's work."""

    def __init__(
        self,
        kv: Kv,
        halves: Halves,
        compute: Compute,
        *,
        ahead: bool = False,
        budget: int = 8192,
        poisoned: bool = False,
    ) -> None:
        self.kv = kv
        self.halves = halves
        self.pool = PagePool(kv.shape.pages)
        self.hook_s = 0.0
        self.told_s = 0.0  # when the tokens of a step were read last
        self.steps = 0
        self.spilled_bytes = self.recalled_bytes = 0
        self._compute = compute
        self._ahead = ahead
        self._budget = budget
        self._poisoned = poisoned
        self._live: dict[str, Live] = {}  # in the order of arrival
        self._held: dict[str, list[int]] = {}  # pages of aborted requests that something is loaded into
        self._ended: set[str] = set()
        self._fresh: list[int] = []
        self._under_way: deque[Step] = deque()
        self._names = itertools.count(1)
        self._to_preempt = False

    # requests ---------------------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], output: int | None = 1, *, dry: bool = False, recall: str = "always") -> Live:
        request = Request(f"r{next(self._names)}", list(tokens), recall)
        live = Live(request, output, dry, len(tokens), time.perf_counter())
        live.hashes = prefixes(tokens, self.kv.shape.page)
        self._live[live.name] = live
        self._hook(self.halves.scheduler.on_new_request, request)
        return live

    def abort(self, live: Live) -> None:
        """Its pages stay held while something is loaded into them."""
        if live.done:
            return
        if live.phase is Phase.LOADING:
            live.aborted = True
        self._finish(live)

    def preempt(self, live: Live, out: Output) -> None:
        """Its pages are the pool's at once; it starts again from the front of the line."""
        out.preempted_req_ids.add(live.name)
        self.pool.give_back(live.pages)
        live.pages, live.computed, live.published = [], 0, 0
        live.request.num_computed_tokens, live.admitted, live.phase = 0, False, Phase.WAITING
        self._live = {live.name: live} | self._live

    def preempt_all(self) -> None:
        """All that run, at the next step."""
        self._to_preempt = True

    @property
    def busy(self) -> bool:
        return bool(
            self._live or self._held or self.halves.scheduler.busy or any(step.rows for step in self._under_way)
        )

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until it is so, else until nothing is left to do. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while not until() if until is not None else self.busy:
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._live)} requests do not end; {self.halves.told or 'nothing was told'}")
        if until is None:
            self.step()

    def serve(self, tokens: Sequence[int], output: int | None = 1, **add: Any) -> Live:
        """One request alone, from its arrival to its last spill."""
        live = self.add(tokens, output, **add)
        self.run()
        return live

    # one step ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps += 1
        out, works, rows = self._schedule()
        self._under_way.append(self._execute(out, works, rows))
        computes = bool(works) or self._compute.steady
        while len(self._under_way) > (1 if self._ahead and (rows or computes) else 0):
            self._settle(self._under_way.popleft())
        if not computes:
            time.sleep(IDLE_S)

    def _schedule(self) -> tuple[Output, list[Work], list[tuple[Live, int]]]:
        out = Output(finished_req_ids=self._ended)
        self._ended, self._fresh = set(), []
        works: list[Work] = []
        rows: list[tuple[Live, int]] = []
        if self._to_preempt:
            self._to_preempt = False
            for live in [live for live in self._live.values() if live.phase is Phase.RUNNING]:
                self.preempt(live, out)
        left = self._budget
        for live in list(self._live.values()):
            if live.phase is Phase.RUNNING and left:
                left -= self._put(live, left, out, works, rows)
        for live in list(self._live.values()):
            waits = live.phase is Phase.WAITING and not live.ahead
            if waits and left and not out.preempted_req_ids and self._admit(live, left):
                left -= self._put(live, left, out, works, rows)
        return out, works, rows

    def _put(self, live: Live, left: int, out: Output, works: list[Work], rows: list[tuple[Live, int]]) -> int:
        """Schedules what it has yet to compute, with pages for it; how many tokens."""
        known = live.request.num_tokens + live.ahead
        wanted = known - live.computed
        if live.output and live.request.num_tokens - live.prompt + live.ahead >= live.output:
            wanted = 0  # its last token is under way
        count = min(left, wanted)
        if count <= 0 or (more := self._room(live, live.computed + count, out)) is None:
            return 0
        before, name = live.computed, live.name
        decodes = count == 1 and before == known - 1
        if not live.dry:
            works.append(Work(name, live.request.all_token_ids, before, count, list(live.pages), decodes))
        out.num_scheduled_tokens[name] = count
        self._tell(live, more, out)
        live.computed = live.request.num_computed_tokens = before + count
        last = live.computed == known
        live.ahead += last and bool(live.output)
        rows.append((live, live.computed))
        return 0 if live.dry else count

    def _room(self, live: Live, tokens: int, out: Output) -> list[int] | None:
        """Pages for so many tokens in all; others that run give theirs if need be, the last one first."""
        count = max(0, -(-tokens // self.kv.shape.page) - len(live.pages))
        while (more := self.pool.take(count)) is None:
            victim = [other for other in self._live.values() if other.phase is Phase.RUNNING][-1]
            if victim.name in out.num_scheduled_tokens:
                return None  # it is in this step already
            self.preempt(victim, out)
            if victim is live:
                return None
        live.pages += more
        self._fresh += more
        return more

    def _tell(self, live: Live, more: list[int], out: Output) -> None:
        before = live.computed
        if not live.seen:
            live.seen = True
            out.scheduled_new_reqs.append(NewRequest(live.name, (list(live.pages),), before))
        else:
            cached = out.scheduled_cached_reqs
            cached.req_ids.append(live.name)
            if not live.admitted:
                cached.resumed_req_ids.add(live.name)
            whole = more if live.admitted else list(live.pages)
            cached.new_block_ids.append((whole,) if whole else None)
            cached.num_computed_tokens.append(before)
        live.admitted = True

    def _admit(self, live: Live, left: int) -> bool:
        """Whether a request that waits runs now; it may load first. It takes pages from nobody."""
        page, tokens = self.kv.shape.page, live.request.num_tokens
        if not live.loading:
            if len(live.hashes) != tokens // page:
                live.hashes = prefixes(live.request.all_token_ids, page)
            hit = self.pool.find(live.hashes[: (tokens - 1) // page])
            external, _ = self._hook(self.halves.scheduler.matched, live.request, len(hit) * page)
            more = self._pages_for(len(hit) * page, external, tokens, left)
            if external is None or more is None:
                self.pool.give_back(hit)
                return False
            live.pages, live.published = hit + more, len(hit)
            live.computed = live.request.num_computed_tokens = min(len(hit) * page + external, tokens - 1)
            if external:
                live.loading, live.phase = external, Phase.LOADING
                self._hook(self.halves.scheduler.allocated, live.request, (live.pages,), external)
                return False
        live.loading = 0
        self._hook(self.halves.scheduler.allocated, live.request, (live.pages,), 0)
        live.phase = Phase.RUNNING
        return True

    def _pages_for(self, hit: int, external: int | None, tokens: int, left: int) -> list[int] | None:
        """Where something is recalled, pages for all of its tokens, or two that have recalled might wait for each
        other's; None: there are too few for that, or for what is to be computed now."""
        page = self.kv.shape.page
        if external:
            return self.pool.take(-(-(tokens - hit) // page))
        return [] if self.pool.free * page >= min(left, tokens - hit) else None

    def _execute(self, out: Output, works: list[Work], rows: list[tuple[Live, int]]) -> Step:
        worker = self.halves.worker
        plan = self._hook(self.halves.scheduler.plan, out)
        self._hook(worker.before_forward, plan)
        if self._poisoned:
            self.kv.poison(self._fresh)
        sampled = self._compute.forward(works)
        self._hook(worker.start_loads, plan)
        self._hook(worker.end_of_step, plan)
        received = self._hook(worker.take_received)
        bad, report = self._hook(worker.take_bad_pages), self._hook(worker.take_report)
        return Step(rows, sampled, report, received.requests, bad)

    def _settle(self, step: Step) -> None:
        for live in self._live.values():
            if live.phase is Phase.LOADING and not step.bad.isdisjoint(live.pages):
                good = next(n for n, page in enumerate(live.pages) if page in step.bad)
                live.computed = live.request.num_computed_tokens = min(live.computed, good * self.kv.shape.page)
        tokens = step.sampled.tokens()
        self.told_s = time.perf_counter()
        for live, computed in step.rows:
            self._advance(live, computed, tokens.get(live.name, 0))
        if step.report is not None:
            if not self._compute.costs:
                step.report.seconds.clear()
            self.recalled_bytes += step.report.recalled_bytes
            self.spilled_bytes += step.report.spilled_bytes
            self._hook(self.halves.scheduler.stepped, step.report)
        for name in step.received:
            self._received(name)

    def _advance(self, live: Live, computed: int, token: int) -> None:
        """A step that computed its tokens up to `computed` is over."""
        request = live.request
        if live.phase is Phase.ENDED:
            return
        if live.ahead and computed == request.num_tokens:
            live.ahead -= 1
            request.all_token_ids.append(token)
        if live.phase is Phase.RUNNING:
            self._publish(live, min(computed, live.computed))
        if live.output is not None and computed >= live.prompt and len(live.tokens) >= live.output:
            self._finish(live)  # also one that was preempted when its last token was under way

    def _publish(self, live: Live, tokens: int) -> None:
        if live.dry:
            return
        whole = min(tokens // self.kv.shape.page, len(live.hashes))
        for n in range(live.published, whole):
            self.pool.publish(live.hashes[n], live.pages[n])
        live.published = max(live.published, whole)

    def _received(self, name: str) -> None:
        live = self._live.get(name)
        if live is None or live.aborted:
            self.pool.give_back(self._held.pop(name))
            return
        live.filled_s = time.perf_counter() - live.arrived
        if live.computed == 0:  # nothing of it arrived: it is asked for again
            self.pool.give_back(live.pages)
            live.pages, live.loading = [], 0
        live.phase = Phase.WAITING

    def _finish(self, live: Live) -> None:
        live.request.finished = True
        receipt = self._hook(self.halves.scheduler.finished, live.request)
        live.receipt = (receipt or {}).get("stepwell", {})
        self._compute.forget(live.name)
        if live.aborted:
            self._held[live.name] = live.pages
        else:
            self.pool.give_back(live.pages)
        live.phase = Phase.ENDED
        del self._live[live.name]
        self._ended.add(live.name)

    def _hook(self, call: Callable[..., T], *arguments: Any) -> T:
        began = time.thread_time()
        try:
            return call(*arguments)
        finally:
            self.hook_s += time.thread_time() - began
