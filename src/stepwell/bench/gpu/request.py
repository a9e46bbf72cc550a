"""What the halves of the adapter read of vLLM's Request and SchedulerOutput, and no more; docs/design/vllm.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Request:
    """`all_token_ids`: prompt and output. `recall`: the request's own wish, for measurements that leave nothing to
    weighing."""

    request_id: str
    all_token_ids: list[int]
    recall: str = "always"
    num_computed_tokens: int = 0
    finished: bool = False
    skip_reading_prefix_cache: bool = False
    lora_request: None = None
    cache_salt: str | None = None
    prompt_embeds: None = None
    mm_features: tuple[()] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        return {"stepwell": {"recall": self.recall}}

    def is_finished(self) -> bool:
        return self.finished


@dataclass(slots=True)
class NewRequest:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """Of one scheduled step."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
