"""Bytes of the engine's pages, as vLLM's config of its KV cache says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def layer_pages(kv_cache_config: KVCacheConfig) -> list[tuple[int, int]]:
    """How many layers there are with pages of how many bytes, in the order of the engine's tensors. Where there are
    several groups, they share memory: layers are those of the largest.

    The scheduler's copy of the config has one spec for all layers of a group, that of the first tensor, though pages of
    the others may differ in size. Theirs is taken from where they lie; padding, if they have any, counts with them.
    """
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    # Either the pages of a layer follow each other, or the layers of a page do: the smaller stride is one layer's page.
    if len(groups) > 1:
        sizes = {name: min(one.layer_stride, one.block_stride) for one in tensors for name in one.layers}
        largest = max(([sizes[name] for name in group.layer_names] for group in groups), key=sum)
        return [(largest.count(size), size) for size in dict.fromkeys(largest)]
    pages = [(len(tensor.layers), min(tensor.layer_stride, tensor.block_stride)) for tensor in tensors]
    if pages:
        spec = groups[0].kv_cache_spec
        first = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
        pages[0] = (pages[0][0], first.unpadded_page_size_bytes)
    return pages


def page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a page over all layers of one rank."""
    return sum(layers * size for layers, size in layer_pages(kv_cache_config))
