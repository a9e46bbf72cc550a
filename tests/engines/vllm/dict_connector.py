"""A KV connector of a few lines for the harness to prove itself on. It is no example of a good one: no bound, no
identity beyond vLLM's block hash, no deadline, and on request it makes the mistakes that a harness must find."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

SPOILS = ("spoils", "spoils and says so", "spoils, says so, and saves the step")
STORES: dict[str, dict[tuple[bytes, int], list[Any]]] = {}  # name -> (block hash, rank) -> the page's layers


@dataclass
class Plan(KVConnectorMetadata):
    loads: list[tuple[str, list[tuple[bytes, int]]]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class DictConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps pages in a dict. `extra["fault"]` names what it does wrong."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.store = STORES.setdefault(extra["store"], {})
        self.fault, self.delay, self.sync = extra.get("fault"), extra.get("delay", 0), extra.get("sync", False)
        self.page = vllm_config.cache_config.block_size
        self.ranks = vllm_config.parallel_config.world_size
        self.rank = vllm_config.parallel_config.rank
        self.calls: list[str] = []
        self.requests: dict[str, Any] = {}
        self.local: dict[str, int] = {}  # request -> pages hit in the engine's own cache
        self.plan = Plan()
        self.loading: list[list[Any]] = []  # [steps left, request id, pairs]
        self.late: list[tuple[bytes, int]] = []
        self.failed: set[int] = set()
        if role == KVConnectorRole.WORKER:
            assert self.rank == get_tensor_model_parallel_rank()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.local[request.request_id] = count = first = num_computed_tokens // self.page
        most = (request.num_tokens - 1) // self.page
        hashes = request.block_hashes
        while count < most and all((hashes[count], rank) in self.store for rank in range(self.ranks)):
            count += 1
        return (count - first) * self.page, count > first and not self.sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first, pages = self.local[request.request_id], blocks.get_block_ids()[0]
            blocks_to_load = range(first, first + num_external_tokens // self.page)
            self.plan.loads.append((request.request_id, [(request.block_hashes[i], pages[i]) for i in blocks_to_load]))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        self.calls.append("build_connector_meta")
        for rid, count in scheduler_output.num_scheduled_tokens.items():
            request, pages = self.requests[rid], self.manager.get_block_ids(rid)[0]
            full = min((request.num_computed_tokens + count) // self.page, len(request.block_hashes))
            self.plan.saves += [(request.block_hashes[i], pages[i]) for i in range(full)]
        plan, self.plan = self.plan, Plan()
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls.append("update_connector_output")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        del self.requests[request.request_id]
        return self.fault == "leak", {"pages": len(block_ids[0])}

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def reset_cache(self) -> bool:
        if self.fault != "keeps on reset":
            self.store.clear()
        return True

    # worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.calls.append(f"start_load_kv({', '.join(kwargs)})")
        for rid, pairs in self._get_connector_metadata().loads:
            for n, (key, page) in enumerate(pairs):
                for layer, kept in zip(self.layers, self.store[key, self.rank], strict=True):
                    if self.fault != "loads nothing":
                        layer[page] = kept
                if self.fault in SPOILS and n == 1:
                    self.layers[-1][page, 0, 3, 0] += 1
            if self.fault in SPOILS[1:]:
                self.failed |= {page for _, page in pairs[1:]}
                if self.fault != SPOILS[2]:
                    del self.store[pairs[1][0], self.rank]
            if not self.sync:
                self.loading.append([self.delay, rid, pairs])

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        if sys.exc_info()[0] is not None and self.fault != "saves half a forward":
            return
        now = [pair for pair in self._get_connector_metadata().saves if (pair[0], self.rank) not in self.store]
        if self.fault == "copies late":
            now, self.late = self.late, now
        for key, page in now:
            if not self.failed or self.fault == SPOILS[2]:
                self.store[key, self.rank] = [layer[page].clone() for layer in self.layers]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        done = {rid for left, rid, _ in self.loading if left == 0}
        self.loading = [[left - 1, rid, pairs] for left, rid, pairs in self.loading if left]
        return None, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed
