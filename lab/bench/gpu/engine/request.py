"""What the halves of the adapter read of vLLM's Request, and no more; docs/design/vllm.md."""

from __future__ import annotations

from dataclasses import dataclass
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
