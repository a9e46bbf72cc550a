"""Bytes of the engine's pages, as vLLM's config of its KV cache says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.engines.vllm.identity.groups import layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def layer_pages(kv_cache_config: KVCacheConfig) -> list[tuple[int, int]]:
    """How many layers there are with pages of how many bytes, in the order of the engine's tensors. Several groups
    share memory: then these are the places of layers, each of as many bytes as the largest layer has there.

    The scheduler's copy of the config has one spec for all layers of a group, that of the first tensor, though pages of
    the others may differ in size. Theirs is taken from where they lie; padding, if they have any, counts with them.
    """
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    if len(groups) > 1:
        specs = dict(named for group in groups for named in layer_specs(group))
        places: dict[int, int] = {}
        for tensor in tensors:
            for number, name in enumerate(tensor.layers):
                at = tensor.offset + number * tensor.layer_stride
                places[at] = max(places.get(at, 0), specs[name].real_page_size_bytes)
        sizes = [size for _, size in sorted(places.items())]
        return [(sizes.count(size), size) for size in dict.fromkeys(sizes)]
    # Either the pages of a layer follow each other, or the layers of a page do: the smaller stride is one layer's page.
    pages = [(len(tensor.layers), min(tensor.layer_stride, tensor.block_stride)) for tensor in tensors]
    if pages:
        spec = groups[0].kv_cache_spec
        first = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
        pages[0] = (pages[0][0], first.unpadded_page_size_bytes)
    return pages


def page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a page over all layers of one rank."""
    return sum(layers * size for layers, size in layer_pages(kv_cache_config))
