"""Steps that show what prefill costs: what each computes is known when it is planned, how long it took when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepwell.engines.vllm.steps import MOST_STEPS
from stepwell.policies.costs.prefill import pairs

Step = tuple[int, float]
"""Tokens, and pairs that attention looks at."""

DECODES = 8
"""A request with at most so many tokens in a step is decoding (some of them guessed), not computing a prompt."""

LEAST_TOKENS, LEAST_SHARE = 16, 0.9
"""Of prompts in a step, for it to show what prefill costs."""


class StepTimes:
    """Steps that are under way. Their number is bounded."""

    def __init__(self) -> None:
        self._under_way: dict[int, Step] = {}

    def begin(self, number: int, out: Any) -> None:
        """A step is planned, as vLLM's SchedulerOutput says."""
        cached = out.scheduled_cached_reqs
        requests = [(new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs]
        requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        tokens = prompts = 0
        seen = 0.0
        for request_id, before in requests:
            n = out.num_scheduled_tokens[request_id]
            tokens += n
            prompts += n if n > DECODES else 0
            seen += pairs(n, before)
        if prompts >= LEAST_TOKENS and prompts >= LEAST_SHARE * tokens:
            self._under_way[number] = tokens, seen
            if len(self._under_way) > MOST_STEPS:
                del self._under_way[next(iter(self._under_way))]

    def ended(self, seconds: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
        """Samples of what has ended. `seconds`: of the slowest rank, by step."""
        for number, took in seconds.items():
            if (step := self._under_way.pop(number, None)) is not None and took > 0:
                yield *step, took
