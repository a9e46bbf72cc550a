"""Makes the half of this process from vLLM's configs and tensors: its shape, its identity, and the client that
joins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.block.facts import digest_of
from stepwell.block.groups import GroupKind, parts_of
from stepwell.block.layout import block_tokens_for
from stepwell.client import scheduler, worker
from stepwell.client.fingerprint import CACHE_NAME
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.engines.common import log_messages
from stepwell.engines.common.adapters import Adapters
from stepwell.engines.common.canaries import Canaries, kind_of
from stepwell.engines.common.counts import Tally
from stepwell.engines.common.plan import Shape
from stepwell.engines.common.weights import WeightsIdentity
from stepwell.engines.common.worker_half import WorkerHalf
from stepwell.engines.paged.base import Copies
from stepwell.engines.paged.pool import idle_bytes
from stepwell.engines.vllm.hooks.plan import ConnectorPlan, ConnectorReport
from stepwell.engines.vllm.identity import facts
from stepwell.engines.vllm.identity.adapters import lora_facts, watch_loads
from stepwell.engines.vllm.identity.drafts import drafted_layers, drafter, recomputed_tokens
from stepwell.engines.vllm.identity.groups import group_rules, layer_specs, zeroed_first
from stepwell.engines.vllm.identity.page_sizes import page_bytes
from stepwell.engines.vllm.identity.weights import weight_files
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.engines.vllm.scheduler.live import Trouble
from stepwell.engines.vllm.settings import ConnectorSettings
from stepwell.errors import ConfigError, StepwellError, Unsupported
from stepwell.protocol.link import Dial

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("stepwell")


class Opening:
    """Makes one half, once, and keeps what was made for it. `dialler` gives another way to reach the well at every
    call. `threaded`: clients and adapters have threads."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: ConnectorSettings,
        dialler: Callable[[], Callable[[], Dial]],
        *,
        threaded: bool,
    ) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._settings = settings
        self._dialler = dialler
        self._threaded = threaded
        self._rules = group_rules(kv_cache_config)
        self._zeroed_first = zeroed_first(config, kv_cache_config)
        self.client: scheduler.SchedulerClient | worker.WorkerClient | None = None
        self._weights: WeightsIdentity | None = None
        self._adapters: Adapters | None = None
        self._work: WorkerHalf | None = None

    def _shape(self, of_page: int) -> Shape:
        """`of_page`: bytes of a page of one rank, over all layers."""
        largest, states = max(rule.page for rule in self._rules), GroupKind.STATE in {rule.kind for rule in self._rules}
        wanted = self._settings.block_tokens
        if states and wanted not in (None, largest):
            raise ConfigError(
                "SW-102",
                what=f"kv_connector_extra_config: block_tokens = {wanted}",
                why=f"a model with states keeps one for every {largest} tokens, and a block has one",
                fix="remove block_tokens",
            )
        tokens = largest if states else wanted or block_tokens_for(largest, of_page)
        return Shape(
            page=self._rules[0].page,
            block_tokens=tokens,
            shard_bytes=of_page * parts_of(self._rules, tokens)[0].pages,
            world=self._config.parallel_config.world_size,
            replicas=getattr(self._kv_cache_config, "kv_tp_replicas", 1),  # vLLM 0.32 has it
            groups=self._rules,
            recomputed=recomputed_tokens(self._config, self._rules),
        )

    def scheduler_half(self, trouble: Trouble, tally: Tally) -> SchedulerHalf:
        """Raises StepwellError, and ImportError or AttributeError for interfaces that this vLLM lacks."""
        transfer = self._config.kv_transfer_config
        shape = self._shape(page_bytes(self._kv_cache_config))
        layout = facts.layout_facts(self._config, self._kv_cache_config)
        model = facts.model_facts(self._config)
        who = EngineIdentity(
            engine=str(transfer.engine_id),
            world=shape.world,
            shard_bytes=shape.shard_bytes,
            block_tokens=shape.stored_tokens,
            layout=digest_of(layout),
            model=digest_of(model),
            label=Path(str(self._config.model_config.model)).name,
            replicas=shape.replicas,
            groups=facts.cache_groups(self._kv_cache_config, shape),
            facts=facts.told(layout | model | {"door": "StepwellConnector"}),
        )
        if transfer.kv_load_failure_policy != "recompute":
            # Read by the scheduler after this constructor: a failed load must never fail a request.
            transfer.kv_load_failure_policy = "recompute"
            log.info('kv_load_failure_policy is set to "recompute": a failed recall is computed, never an error')
        if self._settings.strict:
            self._dialler()()  # raises what keeps the well from serving
        named, cache = self._settings.weights_id, self._settings.home / CACHE_NAME
        self._weights = WeightsIdentity(named, lambda: weight_files(self._config), cache)
        self.client = client = scheduler.SchedulerClient(
            who,
            self._weights,
            self._dialler(),
            options=self._settings.options,
            trouble=log_messages.trouble,
            joined=lambda welcome: log_messages.joined(welcome, who),
            counted=tally.counted,
            threaded=self._threaded,
        )
        adapters = self._open_adapters()
        canaries = self._canaries(shape, client)
        return SchedulerHalf(
            shape,
            client,
            trouble,
            tally,
            canaries,
            adapters=adapters,
            new_plan=ConnectorPlan,
            zeroed_first=self._zeroed_first,
        )

    def _open_adapters(self) -> Adapters | None:
        """None if the engine has no adapters, or if this vLLM does not tell enough of them: requests with one then
        bypass."""
        if (lora := self._config.lora_config) is None:
            return None
        try:
            watch_loads()
            cache = self._settings.home / CACHE_NAME
            self._adapters = Adapters(lora_facts(lora), cache, log_messages.adapter_trouble, threaded=self._threaded)
        except (ImportError, AttributeError, StepwellError) as error:
            log.warning("stepwell: requests with an adapter bypass stepwell: %s", error)
        return self._adapters

    def _canaries(self, shape: Shape, client: scheduler.SchedulerClient) -> Canaries:
        groups = zip(self._rules, self._kv_cache_config.kv_cache_groups, strict=True)
        dtypes = {layer_specs(group)[0][1].dtype for rule, group in groups if rule.kind is GroupKind.FULL}
        kind = kind_of(dtypes.pop()) if len(dtypes) == 1 else None
        names = [set(group.layer_names) for group in self._kv_cache_config.kv_cache_groups]
        drafted = drafted_layers(self._config, set().union(*names))
        if drafter(self._config) is not None and not drafted:
            kind = None  # a drafter's KV may differ although the model's does not, and here they cannot be told apart
        if kind is None and self._settings.canary:
            log.info("the canary is off: KV of this dtype, or beside this drafter's, cannot be compared yet")
        apart = [number for number, layers in enumerate(names) if layers <= drafted]
        return Canaries(shape, client, self._settings.canary, kind, apart)

    def worker_half(
        self, kv_caches: Mapping[str, Any], copier: Callable[[Mapping[str, Any], int], Copies], *, lanes: bool
    ) -> WorkerHalf:
        """Raises StepwellError, and errors of a GPU's driver."""
        copies = copier(kv_caches, self._kv_cache_config.num_blocks)
        if copies.page_bytes != (known := page_bytes(self._kv_cache_config)):
            raise Unsupported(
                "SW-707",
                what="the KV cache of this model is not supported",
                why=f"its pages have {copies.page_bytes} bytes, and {known} by the scheduler's configuration, as when "
                "layers of several page sizes are padded",
                fix="set VLLM_KV_CACHE_LAYOUT=LBHNC, or report the model to the project",
            )
        shape = self._shape(copies.page_bytes)
        parallel = self._config.parallel_config
        page_facts = facts.page_facts(kv_caches, copies.num_pages) | {"page_bytes": str(copies.page_bytes)}
        who = WorkerIdentity(
            engine=str(self._config.kv_transfer_config.engine_id),
            rank=parallel.rank,
            world=shape.world,
            shard_bytes=shape.shard_bytes,
            layout=digest_of(page_facts),
            replicas=shape.replicas,
            facts=facts.told(page_facts),
        )
        self.client = client = worker.WorkerClient(
            who,
            self._dialler(),
            trouble=log_messages.worker_trouble,
            options=self._settings.options,
            threaded=self._threaded,
            prepare=copies.prepare,
        )
        shard, place = divmod(who.rank, shape.replicas)
        try:
            half = self._work = WorkerHalf(
                who.rank,
                shape.shard_bytes,
                copies,
                client,
                shard=shard,
                writes=place == 0,
                idle=self._idle(kv_caches, set()),
                not_compared=self._idle(kv_caches, drafted_layers(self._config, kv_caches)),
                zeroed_first=self._zeroed_first,
                by_request=shape.by_request,
                threaded=lanes,
                report=ConnectorReport,
            )
        except BaseException:
            client.close()  # loads planned for a session without this half would never be answered
            raise
        return half

    def _idle(self, kv_caches: Mapping[str, Any], without: set[str]) -> Sequence[Sequence[slice]]:
        """By cache group, bytes of a page in which its layers keep nothing, those `without` left out; nothing at all
        where none has any."""
        names = [set(group.layer_names) - without for group in self._kv_cache_config.kv_cache_groups]
        idle = [idle_bytes(kv_caches, self._kv_cache_config.num_blocks, of_group) for of_group in names]
        return idle if any(idle) else ()

    def close(self) -> None:
        """Closes all that was made, however far that came. Does not wait."""
        if self._weights is not None:
            self._weights.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._work is not None:
            self._work.close()
        if self.client is not None:
            self.client.close()
