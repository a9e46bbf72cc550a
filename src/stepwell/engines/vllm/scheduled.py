"""What a step computes and which pages it takes, as vLLM's SchedulerOutput says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def computed(out: Any) -> Iterator[tuple[int, int]]:
    """Of each request of the step: tokens that it computes, and tokens before them."""
    cached = out.scheduled_cached_reqs
    requests = [(new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs]
    requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, before in requests:
        yield out.num_scheduled_tokens[request_id], before


def fresh_pages(out: Any) -> list[int]:
    """Pages that requests of this step got with it: others were taken by earlier steps, and named then. Some may be
    another request's as well (a hit), which is read only."""
    pages = [page for new in out.scheduled_new_reqs for page in new.block_ids[0]]
    for more in out.scheduled_cached_reqs.new_block_ids:
        if more:
            pages += more[0]
    return pages
