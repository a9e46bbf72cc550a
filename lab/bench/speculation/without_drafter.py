"""A connector that recalls all but what the drafter keeps, to see what that is worth: zeros are in its place.

vLLM finds it by `kv_connector_module_path`. For models of one cache group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.engines.common.plan import StepPlan
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.identity.drafts import drafted_layers


class WithoutDrafter(StepwellConnector):
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._drafted = [kv_caches[name] for name in drafted_layers(self._vllm_config, kv_caches)]
        assert self._drafted and len(self._kv_cache_config.kv_cache_groups) == 1
        self._loaded: dict[str, list[int]] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if isinstance(self._plan, StepPlan):
            for load in self._plan.loads:
                self._loaded[load.request] = [page for *_, pages in load.blocks for page in pages]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving or ():
            for layer in self._drafted:
                pieces = layer.shape[0] // self._kv_cache_config.num_blocks  # of the kernel, in a page
                for page in self._loaded[request]:
                    layer[page * pieces : (page + 1) * pieces].zero_()
        return results
