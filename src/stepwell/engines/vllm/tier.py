"""StepwellTier: a secondary tier of vLLM's own KV offloading, with a well below it.

    --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":
        {"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":BYTES,"secondary_tiers":[{"type":"stepwell"}]}}'

All methods run in the scheduler's process and only note or look up. vLLM catches nothing that a tier raises, and
asserts that every job is reported once: so every hook fails open, and a job whose hook failed is reported as failed.
What cannot be served correctly leaves the tier inert: every lookup is a miss, every store is refused, the engine runs.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import numpy as np
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.engines.common import log_messages
from stepwell.engines.vllm.hooks.guarded import guarded
from stepwell.engines.vllm.hooks.wrapped import maker_of, part_of
from stepwell.engines.vllm.offloading import opening
from stepwell.engines.vllm.offloading.lookups import Lookups, LookupVerdict
from stepwell.engines.vllm.offloading.transfers import JobEnd, RowJob, RowTransfers
from stepwell.engines.vllm.versions import TESTED, is_tested, lacking
from stepwell.errors import ConfigError, StepwellError
from stepwell.log import RateLimited

if TYPE_CHECKING:
    from stepwell.engines.vllm.settings import ConnectorSettings

log = logging.getLogger("stepwell")

MISSES = "vllm:kv_offload_stepwell_misses"
ERRORS = "vllm:kv_offload_stepwell_errors"

_RESULTS = {
    LookupVerdict.HIT: LookupResult.HIT,
    LookupVerdict.MISS: LookupResult.MISS,
    LookupVerdict.RETRY: LookupResult.RETRY,
}

_served: WeakSet[Any] = WeakSet()
"""Offloading specs that have a tier of ours."""


class StepwellTier(SecondaryTierManager):
    """Tests replace `dialler` to bring their own well."""

    medium: ClassVar[Medium] = Medium.STORAGE
    dialler: ClassVar[Any] = None
    threaded: ClassVar[bool] = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **given: Any,
    ) -> None:
        """Further keys are the connector's settings (home, socket, strict, weights_id) and those of a well that may
        have to be started. Raises only where `strict` asks for that."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_messages.adopt_engine_log("vllm")
        self.locality: Locality | None = None
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        elif enable_kv_events:
            log.warning("stepwell: enable_kv_events of the tier has no effect without vLLM's own: --kv-events-config")
        self._limited = RateLimited(log)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._failed: list[int] = []  # jobs that no thread was given
        self._label = f"{_number(offloading_spec, tier_type)}:{tier_type}"
        self._epoch = LOADED_FROM_FILES
        self._session: opening.TierSession | None = None  # None: inert
        self._lookups: Lookups | None = None
        self._transfers: RowTransfers | None = None
        if not is_tested(vllm.__version__):
            log_messages.untested("vLLM", vllm.__version__, TESTED)
        try:
            self.locality = opening.locality(locality)
            self._open(opening.parse(given))
        except StepwellError as error:
            self._leave()
            if given.get("strict") is True:
                raise
            log.error("stepwell is inert, vLLM's offloading goes on without it: %s", error)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine, which must start
            self._leave()
            why = error if isinstance(error, OSError | RuntimeError) else lacking(error)
            log.error("stepwell is inert, vLLM's offloading goes on without it: %s", why)

    def _open(self, wanted: ConnectorSettings) -> None:
        spec = self._offloading_spec
        if spec in _served:
            raise ConfigError(
                "SW-110",
                what="secondary_tiers has stepwell more than once",
                why="each of them would store the same chunks in a well",
                fix="keep one; a well has tiers of its own",
            )
        connector = opening.find_in_callers(KVConnectorBase_V1)
        if connector is not None and (maker := maker_of(connector)) is not None:
            raise part_of(maker)
        config, kv_cache_config = opening.find_in_callers(VllmConfig), opening.find_in_callers(KVCacheConfig)
        if config is None or kv_cache_config is None:
            raise opening.not_found("VllmConfig" if config is None else "KVCacheConfig")
        rows, groups = np.asarray(self._primary_kv_view).view(np.uint8), opening.groups(spec, kv_cache_config)
        session = self._session = opening.open_session(
            spec, config, kv_cache_config, wanted, rows.shape[1], dialler=self.dialler, threaded=self.threaded
        )
        _served.add(spec)
        self._transfers = transfers = RowTransfers(session.client, session.worker, rows)
        self._lookups = Lookups(
            session.client,
            rows.shape[0],
            groups,
            lambda: transfers.busy_rows,
            self._missed,
        )
        if (cold := opening.unseeded(config)) is not None:
            log.warning("stepwell: %s", cold)
            self._tell("cold_restarts", 1)

    def _caught(self, hook: str, error: Exception) -> None:
        """An exception in a hook. Raises nothing."""
        self._limited.log(
            logging.ERROR, hook, "stepwell: %s in %s, answered as a miss: %s", type(error).__name__, hook, error
        )
        self._counts[ERRORS, "hook"] += 1
        self._tell("hook_errors", 1)

    def _go_without(self, request: Any) -> None:
        pass  # a request is known by its id alone here: its next lookups are misses, and its end cleans up

    def _missed(self, reason: str) -> None:
        self._counts[MISSES, reason] += 1

    def _tell(self, name: str, n: int) -> None:
        """For `stepwell stats`."""
        if self._session is not None:
            self._session.client.count(name, n)

    # a step, in the order of its hooks --------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._begin(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(None)
    def _begin(self, request_id: str) -> None:
        if self._lookups is not None:
            self._lookups.begin(request_id)

    @guarded(LookupResult.MISS)
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if self._lookups is None:
            return LookupResult.MISS
        end_token = req_context.get_offload_key_position(key) or 0
        return _RESULTS[self._lookups.lookup(req_context.req_id, key, end_token)]

    def submit_load(self, job_metadata: Any) -> None:
        try:
            if self._lookups is None or self._transfers is None:
                raise RuntimeError("a load of an inert tier")
            job = _job(job_metadata, load=True)
            parts = self._lookups.take(job.request, job.keys)
            try:
                self._transfers.submit_load(job, parts)
            except BaseException:
                self._lookups.loaded(job.request)
                raise
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._failed.append(job_metadata.job_id)
            self._caught("submit_load", error)

    def submit_store(self, job_metadata: Any) -> None:
        try:
            if self._transfers is None:
                self._failed.append(job_metadata.job_id)
                return
            self._transfers.submit_store(_job(job_metadata, load=False), self._epoch)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self._failed.append(job_metadata.job_id)
            self._caught("submit_store", error)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        failed, self._failed = self._failed, []
        results = [JobResult(job_id=job, success=False) for job in failed]
        if self._transfers is not None:
            for ended in self._transfers.ended():
                self._ended(ended)
                results.append(
                    JobResult(
                        job_id=ended.job.number,
                        success=ended.complete,
                        successful_keys=ended.done if ended.job.load and ended.done and not ended.complete else None,
                        transfer_time=ended.seconds,
                        transfer_bytes=ended.nbytes,
                    )
                )
        return results

    @guarded(None)
    def _ended(self, ended: JobEnd) -> None:
        load = ended.job.load
        if load and self._lookups is not None:
            self._lookups.loaded(ended.job.request)
        if ended.error is not None:
            kind = "load" if load else "store"
            self._limited.log(
                logging.WARNING, kind, "stepwell: a %s failed: %s: %s", kind, type(ended.error).__name__, ended.error
            )
        if ended.reason:
            self._missed(ended.reason)
        elif (missing := len(ended.job.keys) - len(ended.done)) > 0:
            self._counts[ERRORS, "failed_load" if load else "refused_store"] += missing
            self._tell("failed_loads" if load else "refused_stores", missing)
        if self._events is not None and not load and ended.done:
            stored = list(ended.done)
            self._events.append(OffloadingEvent(stored, self.medium, removed=False, locality=self.locality))

    def has_pending_work(self) -> bool:
        return bool(self._failed) or (self._transfers is not None and self._transfers.unreported)

    @guarded(None)
    def on_schedule_end(self, context: Any) -> None:
        if self._lookups is not None and self._session is not None:
            self._lookups.end_of_step()
            self._session.client.report(idle=False)

    @guarded(None)
    def on_request_finished(self, req_context: Any) -> None:
        if self._lookups is not None:
            self._lookups.end(req_context.req_id)

    # rarely -----------------------------------------------------------------------------------------------------------

    @guarded(())
    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """vLLM calls this where it resets its caches, since weights may have changed: no row is touched any more when
        it returns, and what was stored before is never found again by this engine."""
        self._epoch = secrets.randbits(64) or 1
        self._reset()
        if self._transfers is not None:
            self._transfers.drain()

    @guarded(None)
    def _reset(self) -> None:
        if self._lookups is not None:
            self._lookups.reset(self._epoch)

    def shutdown(self) -> None:
        """Ends threads and session. When it returns, nothing here refers to vLLM's memory."""
        transfers, self._transfers, self._lookups = self._transfers, None, None
        if transfers is not None:
            transfers.close()
        self._primary_kv_view = memoryview(b"")
        _served.discard(self._offloading_spec)
        self._leave()

    def _leave(self) -> None:
        """Ends the session, if there is one. Raises nothing: vLLM would keep its memory for ever."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:  # noqa: BLE001 - the boundary to the engine
                self._caught("shutdown", error)

    # vLLM's /metrics --------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            MISSES: OffloadingCounterMetadata(
                documentation="Runs of chunks of which the well had less than was looked up, by tier and by why.",
                labelnames=("tier", "reason"),
            ),
            ERRORS: OffloadingCounterMetadata(
                documentation="Chunks that were not loaded or stored, and exceptions in hooks, by tier and kind.",
                labelnames=("tier", "kind"),
            ),
        }

    @guarded(None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        counts, self._counts = self._counts, Counter()
        for (name, value), n in counts.items():
            stats.increase_counter(name, n, (self._label, value))
        return stats


def _job(metadata: Any, *, load: bool) -> RowJob:
    rows = tuple(metadata.chunk_ids.tolist())
    return RowJob(metadata.job_id, metadata.req_context.req_id, load, tuple(metadata.keys), rows)


def _number(spec: Any, tier_type: str) -> int:
    """The tier's place in vLLM's labels."""
    kinds = [tier.get("type") for tier in getattr(spec, "secondary_tier_configs", ())]
    return kinds.index(tier_type) + 1 if tier_type in kinds else 1
