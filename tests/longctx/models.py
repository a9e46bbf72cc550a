"""Tiny models with random weights, one of each kind that can be tiered."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HYBRID = ["sliding_attention", "full_attention"]

CONFIGS = {
    "llama": LlamaConfig(**_SMALL),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL),
    "mistral": MistralConfig(**_SMALL, sliding_window=None),
    "gemma2": Gemma2Config(**_SMALL, sliding_window=24, layer_types=_HYBRID, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**_SMALL, sliding_window=24, layer_types=_HYBRID, query_pre_attn_scalar=16),
}


def make(kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2) -> Any:
    """In eval mode; the same seed gives the same weights. Attention is sharper than a random model's would be, so that
    a key that is missing shows."""
    config = copy.deepcopy(CONFIGS[kind])
    if layers != config.num_hidden_layers:
        config.num_hidden_layers = layers
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(8.0 if "q_proj" in name or "k_proj" in name else 4.0)
    if kind == "gemma2":  # SDPA has no soft caps: eager attention is what full attention means here
        model.set_attn_implementation("eager")
    return model.to(dtype).eval()


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (rows, count), generator=made)


__all__ = ["CONFIGS", "make", "tokens"]
