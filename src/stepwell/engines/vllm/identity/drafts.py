"""Speculative decoding: whose KV its drafter keeps, and what becomes of that in a recall.

A drafter with KV of its own keeps it in the engine's pages, beside the model's or in a cache group of its own, so it is
spilled and recalled with them. It decides nothing but how many drafts are accepted: what is answered is the model's
alone. Where a drafter looks at the model's hidden states (EAGLE, MTP), its KV of a token depends on the token behind
it. Of the last token of a prefix that is found it may therefore be another request's, and vLLM computes the last page
of a hit again; so does a recall.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stepwell.block.groups import GroupRule
from stepwell.engines.vllm.identity.values import refusal
from stepwell.errors import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WITHOUT_KV = ("ngram", "suffix")
"""Methods that look at nothing but tokens: all KV is the model's own."""

WITH_KV = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter is a model with KV of its own."""

_LAYER = re.compile(r"\.(\d+)\.")


def unsupported_drafts(vllm_config: VllmConfig) -> Unsupported | None:
    """Why this engine's speculative decoding keeps it from being served, or None."""
    drafts = vllm_config.speculative_config
    if drafts is None or (method := getattr(drafts, "method", None)) in WITHOUT_KV:
        return None
    what = f"speculative decoding by {method}"
    if method not in WITH_KV:
        why = "what its drafter keeps of a prefix is not known"
        return refusal("SW-708", what, why, f"draft by {', '.join((*WITHOUT_KV, *WITH_KV))}, or switch it off")
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        why = "the last stage alone has the drafter, so that pages of the ranks differ"
        return refusal(
            "SW-708", f"{what} with pipeline_parallel_size={stages}", why, "leave it at 1, or draft by ngram"
        )
    return None


def drafter(vllm_config: VllmConfig) -> Any:
    """vLLM's config of a drafter that keeps KV of its own, or None."""
    drafts = vllm_config.speculative_config
    return drafts if getattr(drafts, "method", None) in WITH_KV else None


def recomputed_tokens(vllm_config: VllmConfig, rules: Sequence[GroupRule]) -> int:
    """Tokens at the end of a prefix that are computed again although they were found, in whole pages of every group:
    as many as the engine computes again of a hit of its own."""
    drafts = drafter(vllm_config)
    if drafts is None or not getattr(drafts, "use_eagle_block_drop", drafts.use_eagle)():
        return 0
    page, ahead = max(rule.page for rule in rules), getattr(vllm_config, "num_prefill_lookahead_tokens", 1)
    return -(-ahead // page) * page


def drafted_layers(vllm_config: VllmConfig, names: Iterable[str]) -> set[str]:
    """Of these layers, those of the drafter: vLLM numbers them on behind the model's, or names them apart."""
    if drafter(vllm_config) is None:
        return set()
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    numbers = {name: int(found[1]) for name in names if (found := _LAYER.search(name)) is not None}
    return {name for name, number in numbers.items() if number >= layers or name.startswith("draft_model.")}
