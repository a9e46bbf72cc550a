"""An engine without a model: both halves of the vLLM adapter over a real well, stepped in vLLM's order by hand.

Requests are vLLM's own objects, the plan of a step a stand-in with the fields that connectors read; there is no forward
and no KV is computed, a pause stands for both. What is timed is stepwell's code and the well behind it. Scheduler and
worker share this process, whose main thread is both; each has its link, as in an engine. One thread may use it.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from lab.bench.halves.scheduled import NewRequest, Output
from lab.bench.wells import PATIENCE_S
from lab.rig.well import eventually
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import SchedulerClient
from stepwell.client.socket import dial
from stepwell.client.start import find
from stepwell.client.worker import WorkerClient
from stepwell.engines.common.plan import Shape, StepPlan
from stepwell.engines.common.worker_half import WorkerHalf
from stepwell.engines.paged.cpu import open_cpu
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.errors import StepwellError

T = TypeVar("T")


class AskingClient(SchedulerClient):
    """Remembers the last question, so that its answer can be awaited where an engine would go on."""

    last: PrefixQuestion | None = None

    def ask(
        self, digests: bytes, epoch: int, order: int, tokens: int = 0, recall: str = "", prefix: int = 0
    ) -> PrefixQuestion | None:
        self.last = super().ask(digests, epoch, order, tokens, recall, prefix)
        return self.last


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Live:
    """A request and what vLLM's scheduler would know of it. `scheduled`: at least once."""

    request: Request
    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    scheduled: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Kv:
    """The engine's KV: `pages` pages of `page` tokens, in each of `layers` layers `layer_bytes` bytes a page. A block
    has `block_tokens` tokens."""

    page: int = 128
    block_tokens: int = 128
    pages: int = 512
    layers: int = 1
    layer_bytes: int = 4096

    @property
    def shard_bytes(self) -> int:
        return self.layers * self.layer_bytes * self.block_tokens // self.page


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a hook: tokens of its request or of its step's requests, wall seconds, seconds of this thread on a
    processor (the rest it waited, or another process had the core)."""

    tokens: int
    wall_s: float
    cpu_s: float


class StandIn:
    """`times` holds every call, by hook. `tokens_a_step`: longer prompts are prefilled in several steps; the default is
    vLLM's own."""

    def __init__(
        self, home: Path, kv: Kv, *, pause_s: float = 0.0, tokens_a_step: int = 2048, model: bytes = b"m" * 32
    ) -> None:
        self.kv = kv
        self.times: defaultdict[str, list[Call]] = defaultdict(list)
        self._tokens_a_step = tokens_a_step
        self.troubles: list[str] = []
        self.receipts: list[dict[str, Any]] = []
        self._pause_s = pause_s
        self._live: dict[str, Live] = {}
        self._free = deque(range(1, kv.pages))
        self._ended: set[str] = set()
        self._received: set[str] = set()
        self._names = itertools.count(1)
        engine, layout = secrets.token_hex(8), b"l" * 32

        def find_well() -> Callable[..., Any]:
            return dial(find(home))

        whole = torch.zeros(kv.layers, kv.pages, kv.layer_bytes, dtype=torch.uint8)
        self.caches = {f"layer {n}": layer for n, layer in enumerate(whole)}
        self.worker_client = WorkerClient(
            WorkerIdentity(engine, 0, 1, kv.shard_bytes, layout), find_well, trouble=self._trouble
        )
        self.worker = WorkerHalf(0, kv.shard_bytes, open_cpu(self.caches, kv.pages), self.worker_client)
        self.client = AskingClient(
            EngineIdentity(engine, 1, kv.shard_bytes, kv.block_tokens, layout, model, "bench"),
            lambda: b"w" * 32,
            find_well,
            trouble=self._trouble,
        )
        self.scheduler = SchedulerHalf(
            Shape(kv.page, kv.block_tokens, kv.shard_bytes, 1),
            self.client,
            lambda hook, error: self.troubles.append(f"{hook}: {error!r}"),
        )

    def _trouble(self, error: StepwellError) -> None:
        self.troubles.append(str(error))

    def wait_ready(self) -> None:
        """Until the session is complete and a slab is mapped. Raises TimeoutError."""
        try:
            eventually(lambda: self.client.live and self.worker_client.mapped > 0, "a session, and a slab", PATIENCE_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {'; '.join(self.troubles) or 'no trouble was told'}") from None

    def close(self) -> None:
        self.worker.close()
        self.client.close()
        self.worker_client.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, tokens: Sequence[int], output: int = 1) -> Request:
        """A request that nobody has been told of."""
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        return Request(str(next(self._names)), list(tokens), params, None)

    def add(self, tokens: Sequence[int], output: int = 1) -> Live:
        request = self.request(tokens, output)
        live = self._live[request.request_id] = Live(request)
        self._timed("on_new_request", request.num_tokens, self.scheduler.on_new_request, request)
        return live

    def serve(self, tokens: Sequence[int], output: int = 1) -> int:
        """One request alone, from its arrival to its last spill; the tokens that were recalled."""
        self.add(tokens, output)
        self.run()
        return int(self.receipts[-1]["recalled_tokens"])

    def run(self) -> None:
        """Steps until no request is left and nothing is to be saved. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while self._live or self.scheduler.busy:
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._live)} requests do not end")
        self.step()

    # --- one step, in vLLM's order ------------------------------------------------------------------------------------

    def step(self) -> None:
        out = self._schedule()
        tokens = sum(self._live[name].request.num_tokens for name in out.num_scheduled_tokens)
        plan: StepPlan = self._timed("build_connector_meta", tokens, self.scheduler.plan, out)
        self.worker.before_forward(plan)
        if self._pause_s:
            time.sleep(self._pause_s)
        self.worker.start_loads(plan)
        self.save(plan)
        received = self.worker.take_received().requests
        self.worker.take_bad_pages()
        report = self.worker.take_report()
        for name in list(out.num_scheduled_tokens):
            self._advance(self._live[name], out.num_scheduled_tokens[name])
        self._timed("update_connector_output", tokens, self.scheduler.stepped, report)
        self._received |= received

    def save(self, plan: StepPlan) -> None:
        """The worker's last hook, which spills. A benchmark of copies replaces it."""
        self.worker.end_of_step(plan)

    def _schedule(self) -> Output:
        out = Output(finished_req_ids=self._ended)
        self._ended = set()
        for live in list(self._live.values()):
            if live.phase is Phase.WAITING:
                self._ask(live)
            elif live.phase is Phase.LOADING and live.request.request_id in self._received:
                self._received.discard(live.request.request_id)
                self._allocated(live, 0)
                live.phase = Phase.RUNNING
        budget = self._tokens_a_step
        for live in self._live.values():
            count = min(budget, live.request.num_tokens - live.computed)
            if live.phase is Phase.RUNNING and count > 0:
                budget -= count
                self._put(out, live, count)
        return out

    def _ask(self, live: Live) -> None:
        hook = "get_num_new_matched_tokens, again" if live.asked else "get_num_new_matched_tokens, first"
        live.asked = True
        tokens, _ = self._timed(hook, live.request.num_tokens, self.scheduler.matched, live.request, 0)
        if tokens is None:
            return
        if not live.pages:
            live.pages = [self._free.popleft() for _ in range(-(-self._most_tokens(live) // self.kv.page))]
        self._allocated(live, tokens)
        live.computed = min(tokens, live.request.num_tokens - 1)
        live.phase = Phase.LOADING if tokens else Phase.RUNNING

    @staticmethod
    def _most_tokens(live: Live) -> int:
        return int(live.request.num_prompt_tokens + live.request.max_tokens)

    def _allocated(self, live: Live, external: int) -> None:
        tokens = live.request.num_tokens
        self._timed("update_state_after_alloc", tokens, self.scheduler.allocated, live.request, (live.pages,), external)

    @staticmethod
    def _put(out: Output, live: Live, count: int) -> None:
        name = live.request.request_id
        out.num_scheduled_tokens[name] = count
        if not live.scheduled:
            live.scheduled = True
            out.scheduled_new_reqs.append(NewRequest(name, (live.pages,), live.computed))
            return
        cached = out.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.new_block_ids.append(None)
        cached.num_computed_tokens.append(live.computed)

    def _advance(self, live: Live, count: int) -> None:
        request = live.request
        live.computed += count
        request.num_computed_tokens = live.computed
        if live.computed < request.num_tokens:
            return
        request.append_output_token_ids(7)
        if request.num_output_tokens < request.max_tokens:
            return
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        receipt = self._timed("request_finished", request.num_tokens, self.scheduler.finished, request)
        self.receipts.append((receipt or {}).get("stepwell", {}))
        del self._live[request.request_id]
        self._ended.add(request.request_id)
        self._free.extend(live.pages)

    def _timed(self, hook: str, tokens: int, call: Callable[..., T], *arguments: Any) -> T:
        cpu, began = time.thread_time(), time.perf_counter()
        answer = call(*arguments)
        ended = time.perf_counter()
        self.times[hook].append(Call(tokens, ended - began, time.thread_time() - cpu))
        return answer


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    """Endless distinct prompts of random tokens."""
    source = random.Random(seed)
    while True:
        yield [source.randrange(32_000) for _ in range(length)]
