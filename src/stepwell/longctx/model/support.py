"""Models that can be tiered correctly. A model that is not known to be is refused, with the reason."""

from __future__ import annotations

from typing import Any

from stepwell.errors import Unsupported

TIERED = "full_attention"
_BUILT_IN = ("sliding_attention",)
"""Layers that keep the cache that transformers gives them: they are short."""


def layer_types(config: Any) -> list[str]:
    """Type of each layer of the model's decoder. Raises Unsupported SW-716 for a model that cannot be used across
    tiers."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "it has an encoder, whose keys are not a growing context")
    text = config.get_text_config(decoder=True)
    if not (getattr(text, "num_attention_heads", None) and getattr(text, "num_key_value_heads", None)):
        raise _unsupported(text, "its configuration names no attention heads with keys and values")
    for setting, why in _REFUSED.items():
        if getattr(text, setting, None):
            raise _unsupported(text, f"it has {setting}={getattr(text, setting)!r}: {why}")
    types: list[str] = get_layer_types_and_kwargs(text)[0]
    for kind in sorted(set(types)):
        if kind != TIERED and kind not in _BUILT_IN:
            raise _unsupported(text, f"it has layers of the kind {kind}, which are not attention over all tokens")
    if TIERED not in types:
        raise _unsupported(text, "all of its layers have a window, so its context does not grow")
    return types


_REFUSED = {
    "num_kv_shared_layers": "layers without keys of their own never update the cache",
    "index_topk": "it selects tokens with an indexer of its own",
    "kv_lora_rank": "its keys and values are latent (MLA)",
    "use_bidirectional_attention": "tokens see what comes after them",
    "alibi": "its attention has a bias by position",
}


def _unsupported(config: Any, why: str) -> Unsupported:
    return Unsupported(
        "SW-716",
        what=f"a model of the type {getattr(config, 'model_type', 'unknown')!r} cannot be used across tiers",
        why=why,
        fix="use it with transformers' own cache; Llama, Qwen, Mistral and Gemma (text) can be",
    )
