"""Both halves of a vLLM KV connector in the real scheduler, without a model.

A `Harness` is one engine in one process: vLLM's `Scheduler` (or `AsyncScheduler`) with a connector of role SCHEDULER,
one worker half per rank, and the step loop of `EngineCore` between them. Plans and outputs are pickled there and back.
Pages are poisoned when allocated, KV is a hash of the tokens before it, and all KV that attention would read is
checked in every forward: whatever a connector does wrong to a byte ends in `violations`. Knows nothing of stepwell.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .build import VOCAB, Setup, build
from .oracle import Oracle, TokenChain
from .outcome import Outcome, Stuck, WrongToken
from .reports import Reports
from .worker import WorkerHalf, WrongKV, drafts_of


class Harness:
    """One engine; `with Harness(Setup(...)) as h`. Attributes are for reading, methods for acting."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.requests: dict[str, Outcome] = {}
        """Every request ever added, also to engines that were restarted away."""
        self.wrong_kv: list[WrongKV] = []
        self.wrong_tokens: list[WrongToken] = []
        self.forgiven: list[WrongKV] = []
        """Wrong KV that the connector reported as failed to load in time, so that vLLM dropped the result."""
        self.connector_stats: list[Any] = []
        """What `KVConnectorStats.to_dict` gave vLLM's loggers, per step in which there were any."""
        self.hits: Counter[str] = Counter()
        """Tokens that the connector brought, by where vLLM counted them to come from."""
        self.failures: Counter[int] = Counter()
        """Pages reported as failed to load, by step."""
        self.steps = 0
        self.last_plan: SchedulerOutput | None = None
        """As the scheduler made it, before workers saw it."""
        self.before_update: Callable[[], None] | None = None
        """Called in each step between the workers' end and the scheduler's processing of their output."""
        self._vllm_requests: dict[str, Request] = {}
        self._serial = 0
        self._halves: list[Any] = []  # everything started and not yet shut down
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # --- life of the engine ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        built = build(self.setup)
        s = self.setup
        self.oracle = Oracle(weights=s.weights, heads=s.heads_per_rank, words=s.words, vocab=VOCAB)
        self.workers: list[WorkerHalf] = []
        for rank in range(s.ranks):
            self.workers.append(WorkerHalf(rank, s, built, self.oracle))
            self._halves.append(self.workers[-1])
        self.config = built.vllm_config
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=built.scheduler_kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=built.block_size,
            hash_block_size=built.hash_block_size,
            log_stats=True,
        )
        self._halves.append(self.scheduler)
        self.scheduler.use_v2_model_runner = s.runner_v2
        self.connector = self.scheduler.connector
        self._aggregator = KVOutputAggregator.from_connector(self.connector, s.ranks)
        handshake = {(0, w.rank): w.handshake for w in self.workers if w.handshake is not None}
        if handshake:
            self.connector.set_xfer_handshake_metadata_pp_aware(handshake)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._block_hasher = get_request_block_hasher(built.hash_block_size, hash_fn)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._fresh: list[int] = []
        take = self.pool.get_new_blocks

        def take_and_note(count: int) -> list[Any]:
            blocks = take(count)
            self._fresh.extend(b.block_id for b in blocks)
            return blocks

        self.pool.get_new_blocks = take_and_note
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._aborts: list[str] = []
        self._reports = [Reports() for _ in self.workers]
        self._fail: tuple[int, int] | None = None
        self._alive = True

    def close(self) -> None:
        """Shut the halves down as `LLM` does, worker first, and those of killed engines; the second time a no-op."""
        halves, self._halves, self._alive = self._halves, [], False
        for half in halves:
            half.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restart_engine(self, *, kill: bool = False, **changes: Any) -> None:
        """A new engine (scheduler, workers, KV tensors, prefix cache) over whatever the connector keeps outside.

        `kill`: without any `shutdown`, as after SIGKILL, except that threads of the old halves, if any, live on in this
        process until `close`.
        `changes`: fields of `Setup`. Requests that were alive stay in `requests` with finish_reason None.
        """
        self._alive = False
        if not kill:
            self.close()
        self.setup = replace(self.setup, **changes)
        self._start()

    # --- requests -------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        prompt_logprobs: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        request_id: str | None = None,
        **request_fields: Any,
    ) -> str:
        """Queue a request and return its id. `request_fields` go to vLLM's `Request` (priority, lora_request, ...)."""
        self._serial += 1
        rid = request_id or f"r{self._serial}"
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params is not None else None,
        )
        self.requests[rid] = Outcome(rid, list(prompt))
        request = Request(
            rid, list(prompt), params, None, cache_salt=salt, block_hasher=self._block_hasher, **request_fields
        )
        self._vllm_requests[rid] = request
        self.scheduler.add_request(request)
        return rid

    def abort(self, rid: str, *, mid_step: bool = False) -> None:
        """The client goes away: now, or (`mid_step`) while the next step's forward runs."""
        if mid_step:
            self._aborts.append(rid)
        else:
            self._abort([rid])

    def _abort(self, rids: Iterable[str]) -> None:
        for request in self.scheduler.finish_requests(set(rids), RequestStatus.FINISHED_ABORTED):
            self._note_end(self.requests[request.request_id], str(request.get_finished_reason()))

    def request(self, rid: str) -> Request | None:
        """The request object of vLLM, while its scheduler has one."""
        return self.scheduler.requests.get(rid)

    def status(self, rid: str) -> str | None:
        """RUNNING, WAITING_FOR_REMOTE_KVS, PREEMPTED, ...; None once the scheduler has forgotten it."""
        request = self.request(rid)
        return None if request is None else request.status.name

    @property
    def violations(self) -> list[WrongKV | WrongToken]:
        """All that was ever wrong, engines restarted away included; empty is the verdict to hope for."""
        return [*self.wrong_kv, *self.wrong_tokens]

    @property
    def finished(self) -> dict[str, Outcome]:
        return {rid: outcome for rid, outcome in self.requests.items() if outcome.finish_reason is not None}

    def chain(self, rid: str) -> TokenChain:
        """The tokens of a request as they must be, prompt and output."""
        return self.oracle.chain(self.requests[rid].prompt)

    # --- forced events --------------------------------------------------------------------------------------------

    def preempt(self, rid: str) -> None:
        """Preempt one running request between two steps, as the scheduler does when the pool is full.

        Its pages go to the free pool with their prefix-cache entries, so that it may resume by a local hit.
        """
        request = self.scheduler.requests[rid]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(rid)

    def reset_prefix_cache(self, *, preempt: bool = False, connector: bool = False) -> bool:
        """vLLM's call of that name: `preempt` all running requests first, and `reset_cache` of the connector.

        Without `preempt` it returns False and does nothing while any page is in use. With it, vLLM raises RuntimeError
        while a request is parked, and under asynchronous scheduling while a preempted request's step is in flight.
        """
        return self.scheduler.reset_prefix_cache(preempt, connector)

    def update_weights(self, weights: int) -> bool:
        """New parameters under a running engine: everything preempted, both caches reset, KV differs from now on."""
        ok = self.scheduler.reset_prefix_cache(True, True)
        self.oracle.weights = weights
        self.setup = replace(self.setup, weights=weights)
        return ok

    def fail_forward_next(self, layer: int, rank: int = 0) -> None:
        """Raise ForwardFailed out of `step` after this layer of that rank's next forward; the engine is dead then."""
        self._fail = (rank, layer)

    def hold(self, rank: int) -> None:
        """Keep back what this rank reports (finished ids, stats, worker metadata), as if it were slow.

        Failed page ids are let through at once: a late one would be an error of the harness, not of the rank.
        """
        self._reports[rank].hold = True

    def release(self, rank: int) -> None:
        """Let what was held arrive, one report a step, later ones behind it."""
        self._reports[rank].hold = False

    # --- steps ----------------------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether a real engine would go on stepping without new requests."""
        return bool(self.scheduler.has_requests() or self._in_flight)

    def step(self) -> bool:
        """One iteration of the engine core's loop, also if it has nothing to do. True if a forward ran."""
        assert self._alive, "this engine has ended: restart_engine() first"
        executed = False
        try:
            if not self.setup.async_scheduling:
                executed = self._execute()
            elif self.scheduler.has_requests() or not self._in_flight:
                executed = self._execute()
                if len(self._in_flight) < 2 and (executed or self.scheduler.has_requests()):
                    return executed  # the queue of batches is filled before the first output is looked at
            self._process(*self._in_flight.popleft())
        except BaseException:
            self._alive = False
            raise
        return executed

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do, 1 ms apart while only transfers are pending.

        Raises Stuck after `max_steps`: a request that never ends, or blocks that are never freed.
        """
        for _ in range(max_steps):
            if not self.busy():
                return
            if not self.step():
                time.sleep(0.001)
        if self.busy():
            states = {rid: r.status.name for rid, r in self.scheduler.requests.items()}
            raise Stuck(f"not idle after {max_steps} steps: {states or 'connector has pending work'}")

    def run_until(self, condition: Callable[[], bool], max_steps: int = 1000) -> None:
        """Step until the condition holds; raises Stuck if it never does."""
        for _ in range(max_steps):
            if condition():
                return
            if not self.step():
                time.sleep(0.001)
        if not condition():
            raise Stuck(f"condition does not hold after {max_steps} steps")

    def serve(self, prompt: Sequence[int], **add: Any) -> Outcome:
        """Add a request, run to idle, and return what became of it."""
        rid = self.add(prompt, **add)
        self.run()
        return self.requests[rid]

    def _execute(self) -> bool:
        self.steps += 1
        plan = self.scheduler.schedule()
        self.last_plan = plan
        fresh, self._fresh = self._fresh, []
        pickled = pickle.dumps(plan)
        for rid, count in plan.num_scheduled_tokens.items():
            self.requests[rid].computed += count
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            fail_after = None
            if self._fail is not None and self._fail[0] == worker.rank and plan.num_scheduled_tokens:
                fail_after, self._fail = self._fail[1], None
            output: ModelRunnerOutput = pickle.loads(worker.execute(pickled, fresh, self.steps, fail_after))
            output.kv_connector_output = self._reports[worker.rank].arriving(output.kv_connector_output)
            outputs.append(output)
        merged = self._aggregator.aggregate(outputs)
        assert merged is not None
        self._in_flight.append((plan, merged))
        self._judge(merged.kv_connector_output)
        return plan.total_num_scheduled_tokens > 0

    def _judge(self, output: KVConnectorOutput | None) -> None:
        """Sort what the workers found: reported in the same step as a failed load, or a violation."""
        invalid = output.invalid_block_ids if output is not None else set()
        if invalid:
            self.failures[self.steps] += len(invalid)
        for worker in self.workers:
            for wrong in worker.wrong:
                reported = invalid.intersection(wrong.table[: wrong.page_index + 1])
                (self.forgiven if reported else self.wrong_kv).append(wrong)
            worker.wrong.clear()

    def _process(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if self.before_update is not None:
            self.before_update()
        if self._aborts:
            aborts, self._aborts = self._aborts, []
            self._abort(aborts)
        for core_outputs in self.scheduler.update_from_output(plan, output).values():
            for item in core_outputs.outputs:
                self._deliver(item)
            stats = core_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.connector_stats.append(stats.kv_connector_stats)
            for source, tokens in getattr(stats and stats.connector_prefix_cache_stats, "hits_by_source", {}).items():
                self.hits[source.value] += tokens
        if self.setup.drafts and not self.setup.async_scheduling:
            self._draft(plan)

    def _draft(self, plan: SchedulerOutput) -> None:
        """Drafts tokens for requests of this step that go on. With plans made ahead the workers do."""
        drafts = {}
        for rid in plan.num_scheduled_tokens:
            if (request := self.request(rid)) is None:
                continue
            drafts[rid] = drafts_of(self.chain(rid), request.num_tokens, self.setup.drafts)
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _deliver(self, item: EngineCoreOutput) -> None:
        outcome = self.requests[item.request_id]
        chain = self.oracle.chain(outcome.prompt)
        for token in item.new_token_ids:
            if token != chain.token(chain.prompt_len + len(outcome.tokens)):
                self.wrong_tokens.append(WrongToken(self.steps, item.request_id, len(outcome.tokens)))
            outcome.tokens.append(token)
        if item.prefill_stats is not None:
            outcome.local = item.prefill_stats.num_local_cached_tokens
            outcome.external = item.prefill_stats.num_external_cached_tokens
        if item.kv_transfer_params is not None:
            outcome.kv_transfer_params = copy.deepcopy(item.kv_transfer_params)
        if item.finish_reason is not None:
            self._note_end(outcome, str(item.finish_reason))

    def _note_end(self, outcome: Outcome, reason: str) -> None:
        outcome.finish_reason, outcome.last_step = reason, self.steps
        outcome.preemptions = self._vllm_requests[outcome.request_id].num_preemptions

    # --- verdict --------------------------------------------------------------------------------------------------

    def assert_clean(self) -> None:
        """Nothing wrong was read, nothing wrong was answered, and nothing is held: call it when idle."""
        assert not self.violations, "\n".join(map(str, self.violations))
        left = {rid: r.status.name for rid, r in self.scheduler.requests.items()}
        assert not left, f"requests left in the scheduler: {left}"
        free, total = self.pool.get_num_free_blocks(), self.pool.num_gpu_blocks - 1
        assert free == total, f"{total - free} of {total} pages leaked"
        assert not self._in_flight and not self.scheduler.deferred_frees
        assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.kv_holding_waiting
