"""Check of an untested model before its use: it must give the same logits with its KV across tiers."""

from __future__ import annotations

from typing import Any

import torch

from stepwell.errors import Unsupported
from stepwell.longctx.model.cache import TieredCache
from stepwell.longctx.policy import AttentionMode, Policy

KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"})
"""Types of models that the test-suite compares with full attention."""

_POLICY = Policy("self-check", AttentionMode.EXACT, page_tokens=4, sinks=4, window=8, draft_tokens=1)
_PARTS = (70, 1, 1, 9, 1)
_OFF = {torch.float32: 1e-3, torch.float64: 1e-3}


@torch.no_grad()
def check(model: Any) -> None:
    """Compares both on 82 tokens. Raises Unsupported SW-716 if they differ by more than rounding explains, or if the
    tiered pass fails. The model must have our attention implementation set."""
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "model_type", None) in KNOWN:
        return
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (1, sum(_PARTS)), generator=made).to(model.device)
    cache = TieredCache(model.config, _POLICY, hot_tokens=48, host="1GiB")
    try:
        tiered, start = [], 0
        for count in _PARTS:
            tiered.append(model(ids[:, start : start + count], past_key_values=cache).logits)
            start += count
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("sdpa")
            whole = model(ids, use_cache=False).logits
        finally:
            model.set_attn_implementation(before)
        off = float((torch.cat(tiered, 1).float() - whole.float()).abs().max() / whole.float().abs().max())
        if not off <= _OFF.get(whole.dtype, 5e-2):
            raise _differs(text, f"its logits differ by {off:.2g} of the greatest from those of full attention")
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        if isinstance(error, Unsupported):
            raise
        raise _differs(text, f"a pass over a few tokens failed ({type(error).__name__}: {error})") from error
    finally:
        cache.close()


def _differs(text: Any, why: str) -> Unsupported:
    return Unsupported(
        "SW-716",
        what=f"a model of the type {getattr(text, 'model_type', 'unknown')!r} cannot be used across tiers",
        why=why,
        fix=f"use it with transformers' own cache; {', '.join(sorted(KNOWN))} can be",
    )
