"""Reads vLLM's requests and the output of its scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from stepwell import renamed
from stepwell.log import RateLimited

_LONGEST_WISH = len("default")

_limited = RateLimited(logging.getLogger("stepwell"))


def foreign_input(request: Any) -> str:
    """The name of an input that shapes the KV and that the digest does not know, or "". Adapters it may know."""
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streamed_prompt"  # its tokens are not only appended to
    return ""


def recall_wish(request: Any) -> str:
    """How this request wants it: `{"stepwell": {"recall": "auto", "always" or "never"}}` in its `kv_transfer_params`.
    Anything else is as if nothing was said."""
    params = getattr(request, "kv_transfer_params", None)
    ours = params.get("stepwell") if isinstance(params, dict) else None
    wish = ours.get("recall") if isinstance(ours, dict) else None
    if not isinstance(wish, str) or len(wish) > _LONGEST_WISH:
        return ""
    if (meant := renamed.value("recall", wish)) != wish:
        _limited.log(logging.WARNING, "wish", "kv_transfer_params: %s", renamed.old_value("recall", wish))
    return meant


def computed_by(out: Any) -> Iterator[tuple[int, int]]:
    """For each request of the step, tokens that it computes and tokens before them."""
    cached = out.scheduled_cached_reqs
    requests = [(new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs]
    requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, before in requests:
        yield out.num_scheduled_tokens[request_id], before


def fresh_pages(out: Any) -> list[int]:
    """Pages that requests of this step got with it, of all cache groups: others were taken by earlier steps, and named
    then. Some may be another request's as well (a hit), which is read only."""
    pages = [page for new in out.scheduled_new_reqs for table in new.block_ids for page in table]
    for more in out.scheduled_cached_reqs.new_block_ids:
        for table in more or ():
            pages += table
    return pages
