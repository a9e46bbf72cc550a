"""StepwellConnector: vLLM's KVConnectorBase_V1 in front of the two halves.

Every hook fails open: an exception here would end the engine, so it is caught, counted and answered as a miss. What
stepwell cannot serve correctly leaves the connector inert: the engine runs as if it were not there, with one error
line (`strict` refuses to start instead). Only this module and its siblings know vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from stepwell.client.finder import finder
from stepwell.client.scheduler import SchedulerClient
from stepwell.client.worker import WorkerClient
from stepwell.engines.common import log_messages
from stepwell.engines.common.counts import Tally
from stepwell.engines.common.plan import StepPlan, StepReport
from stepwell.engines.common.worker_half import Received, WorkerHalf
from stepwell.engines.paged import open_copies
from stepwell.engines.paged.base import Copies
from stepwell.engines.paged.gpu.cuda import VERIFIED_ON
from stepwell.engines.vllm import settings
from stepwell.engines.vllm.hooks import stats
from stepwell.engines.vllm.hooks.guarded import guarded
from stepwell.engines.vllm.hooks.plan import ConnectorPlan
from stepwell.engines.vllm.hooks.wrapped import maker_of, part_of
from stepwell.engines.vllm.identity.groups import group_rules
from stepwell.engines.vllm.identity.unsupported import unsupported
from stepwell.engines.vllm.opening import Opening
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.engines.vllm.versions import TESTED, is_tested, lacking
from stepwell.errors import StepwellError
from stepwell.log import RateLimited

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    TransferResults: Any = KVConnectorTransferResults
except ImportError:  # before vLLM 0.32, which reports pages only
    TransferResults = None
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST: Any = CacheHitSource.HOST
except ImportError:  # before vLLM 0.32
    HOST = None

log = logging.getLogger("stepwell")

ANSWERS = (
    "build_connector_meta",
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "update_connector_output",
)
"""Hooks that have to exist: without one of them a plan would not arrive or its loads would not be answered, and their
requests would wait for ever."""


class StepwellConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance per process, one half in each. Tests replace `dialler` to bring their own well, `copier` to bring
    their own device, and `lanes` to say themselves when copies that run are looked after."""

    dialler: Callable[[settings.ConnectorSettings], Callable[[], Any]] = staticmethod(
        lambda wanted: finder(wanted.home, wanted.socket, wanted.options)
    )
    copier: Callable[[Mapping[str, Any], int], Copies] = staticmethod(open_copies)
    threaded = True
    lanes = True

    if HOST is not None:
        _cache_hit_source = HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_messages.adopt_engine_log("vllm")
        self._limited = RateLimited(log)
        self._tally = Tally(log_messages.PauseLog().answered)
        self._sched: SchedulerHalf | None = None
        self._work: WorkerHalf | None = None
        self._plan: Any = None  # of the step under way, for the worker half
        self._opening: Opening | None = None  # None: inert from the start
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        transfer = vllm_config.kv_transfer_config
        self._strict = transfer.kv_connector_extra_config.get("strict") is True
        if self._is_scheduler and not is_tested(vllm.__version__):
            log_messages.untested("vLLM", vllm.__version__, TESTED)
        if self._is_scheduler and vllm_config.device_config.device_type == "cuda" and not VERIFIED_ON:
            log_messages.unverified()
        try:
            if (maker := maker_of(self)) is not None:
                raise part_of(maker)
            for hook in (hook for hook in ANSWERS if not hasattr(KVConnectorBase_V1, hook)):
                raise AttributeError(f"KVConnectorBase_V1 has no {hook} any more")
            reason = unsupported(vllm_config, kv_cache_config)
            if reason is not None:
                raise reason
            page = math.lcm(*(rule.page for rule in group_rules(kv_cache_config)))
            wanted = self._settings = settings.parse(transfer.kv_connector_extra_config, page)
            self._opening = Opening(
                vllm_config, kv_cache_config, wanted, lambda: self.dialler(wanted), threaded=self.threaded
            )
            if self._is_scheduler:
                self._sched = self._opening.scheduler_half(self._caught, self._tally)
        except StepwellError as error:
            self._inert(error)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine, which must start
            self._inert(lacking(error))

    # start ------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Makes the worker's half. Raises only where the user asked for that (`strict`)."""
        if self._is_scheduler or self._opening is None or self._client is not None:
            return
        try:
            self._work = self._opening.worker_half(kv_caches, self.copier, lanes=self.lanes)
        except StepwellError as error:
            self._inert(error, alone=True)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine, which must start
            self._caught("register_kv_caches", error)

    @property
    def _client(self) -> SchedulerClient | WorkerClient | None:
        return self._opening.client if self._opening is not None else None

    def _caught(self, hook: str, error: Exception) -> None:
        """Logs and counts an exception in a hook. Raises nothing."""
        self._limited.log(
            logging.ERROR, hook, "stepwell: %s in %s, answered as a miss: %s", type(error).__name__, hook, error
        )
        if isinstance(client := self._client, SchedulerClient):
            with contextlib.suppress(Exception):  # the client may be what raised
                client.count("hook_errors")

    def _go_without(self, request: Any) -> None:
        """Leaves the request that an exception was about without stepwell."""
        if self._sched is not None:
            self._sched.drop(request.request_id)

    def _inert(self, error: StepwellError, *, alone: bool = False) -> None:
        """Logs why this connector serves nothing from here on, or raises it where the user asked for that. `alone`:
        only this process knows of it; what all processes find at their start is logged by the scheduler's."""
        if self._strict:
            raise error
        level = logging.ERROR if alone or self._is_scheduler else logging.DEBUG
        log.log(level, "stepwell is inert, the engine goes on without it: %s", error)

    # engine core, in the order of a step ------------------------------------------------------------------------------

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        if self._sched is not None:
            self._sched.on_new_request(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._sched.matched(request, num_computed_tokens) if self._sched is not None else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        try:
            if self._sched is not None:
                self._sched.allocated(request, blocks.get_block_ids(), num_external_tokens)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._caught("update_state_after_alloc", error)
            self._go_without(request)
            if num_external_tokens and self._sched is not None:
                self._sched.refuse(request.request_id, blocks.get_block_ids(), num_external_tokens)

    if HOST is not None:

        @guarded({})
        def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
            """Tokens by the source where they lay when the request came, which is not always where they are copied
            from."""
            found: Counter[Any] = Counter()
            for tier, tokens in (self._sched.sources(request, num_external_tokens) if self._sched else {}).items():
                names = (source for source in CacheHitSource if source.value == tier)
                found[next(names, CacheHitSource.EXTERNAL_UNSPECIFIED)] += tokens
            return dict(+found)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        try:
            return self._sched.plan(scheduler_output) if self._sched is not None else ConnectorPlan()
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._caught("build_connector_meta", error)
        try:
            return self._sched.plan_as_it_is() if self._sched is not None else ConnectorPlan()
        except Exception as error:  # noqa: BLE001 - the same: what was gathered comes with the plan of the next step
            self._caught("build_connector_meta", error)
            return ConnectorPlan(any_page=True)

    @guarded(None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._sched is None:
            return
        if connector_output.invalid_block_ids:
            self._sched.not_loaded(connector_output.invalid_block_ids)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._sched.stepped(report)

    @guarded((False, None))
    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._sched is None:
            return False, None
        receipt = self._sched.finished(request)
        return False, receipt if self._settings.receipts else None  # to any client of the API: the operator decides

    request_finished_all_groups = request_finished

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        return self._sched is not None and self._sched.busy

    @guarded(True, again=True)
    def reset_cache(self) -> bool:
        """Begins a new epoch of weights: blocks of before are never found again. Always True, or the engine's pause
        would raise."""
        if self._sched is not None:
            self._sched.reset()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache, not a prefill node: preempted requests keep their output

    # worker, in the order of a step -----------------------------------------------------------------------------------

    # What a hook that raised has left undone is answered at the next step.

    @guarded(None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._plan = kv_connector_metadata
        if self._work is not None and isinstance(self._plan, StepPlan):
            self._work.before_forward(self._plan)

    @guarded(None)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata
        if self._work is not None and isinstance(self._plan, StepPlan):
            self._work.fence(self._plan)

    @guarded(None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._work is not None and isinstance(self._plan, StepPlan):
            self._work.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    @guarded(None)
    def wait_for_save(self) -> None:
        if self._work is not None and isinstance(self._plan, StepPlan):
            self._work.end_of_step(self._plan)

    @guarded((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._work.take_received().requests or None if self._work is not None else None)

    if TransferResults is not None:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            received = self._taken_received() or Received()
            return TransferResults(finished_recving=received.requests, failed_recving=received.failed)

        @guarded(None)
        def _taken_received(self) -> Received | None:
            return self._work.take_received() if self._work is not None else None

    @guarded(set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.take_bad_pages() if self._work is not None else set()

    @guarded(None)
    def build_connector_worker_meta(self) -> StepReport | None:
        return self._work.take_report() if self._work is not None else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True, for vLLM 0.33 and later: it calls the two hooks below when the memory of pages goes and comes back."""
        return True

    @guarded(None)
    def unregister_kv_caches(self) -> None:
        if self._work is not None:
            self._work.sleep()

    @guarded(None)
    def restore_kv_caches(self) -> None:
        if self._work is not None:
            self._work.wake_up()

    # the engine's own log and /metrics, in the process that serves them but for the first ----------------------------

    @guarded(None)
    def get_kv_connector_stats(self) -> stats.EngineStats | None:
        counts = self._tally.take()  # a worker counts nothing here: its numbers are in its reports
        return stats.EngineStats(counts) if counts is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.EngineStats:
        return stats.build(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> stats.PromMetrics | None:
        return stats.prom_metrics(*args, **kwargs)

    # both -------------------------------------------------------------------------------------------------------------

    @guarded(None)
    def shutdown(self) -> None:
        """Ends threads and the session. Nothing relies on vLLM calling it."""
        if self._opening is not None:
            self._opening.close()
