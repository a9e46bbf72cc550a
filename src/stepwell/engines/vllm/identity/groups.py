"""The cache groups of an engine, as vLLM's config of its KV cache says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.block.groups import GroupKind, GroupRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNK,
    "MambaSpec": GroupKind.STATE,
}
"""What is served, by exact type: a subclass exists because something about its pages is different."""

_SPANS = {GroupKind.WINDOW: "sliding_window", GroupKind.CHUNK: "attention_chunk_size"}


def zeroed_first(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """The engine zeroes the pages that a step takes before it tells its connector of the step, as vLLM's second model
    runner does for states and for KV of several precisions. The first one, on CPUs too, zeroes them afterwards; which
    one runs is not asked."""
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return bool(zeroes) and vllm_config.device_config.device_type == "cuda"


def layer_specs(group: Any) -> list[tuple[str, Any]]:
    """Each layer of a KV cache group by name, with its spec."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: a spec per layer
    return [(name, own[name] if own else group.kv_cache_spec) for name in group.layer_names]


def group_rules(kv_cache_config: KVCacheConfig) -> tuple[GroupRule, ...]:
    """The rule of each group that is served. Raises KeyError for a kind that is not."""
    rules: list[GroupRule] = []
    for group in kv_cache_config.kv_cache_groups:
        _, spec = layer_specs(group)[0]
        kind = KINDS[type(spec).__name__]
        span = int(getattr(spec, _SPANS[kind])) if kind in _SPANS else 0
        rules.append(GroupRule(kind, int(group.kv_cache_spec.block_size), span))
    return tuple(rules)
