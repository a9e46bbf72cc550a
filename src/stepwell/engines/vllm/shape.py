"""How many tokens and bytes an engine's pages, blocks and shards have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """page: tokens in an engine page. block_tokens: a multiple of it. shard_bytes: of one rank's part of a block.
    replicas: consecutive ranks, of `world`, that hold the same part (MLA, KV heads that are fewer than ranks)."""

    page: int
    block_tokens: int
    shard_bytes: int
    world: int
    replicas: int = 1

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page

    @property
    def shards(self) -> int:
        """Parts of a block, each once."""
        return self.world // self.replicas

    @property
    def block_bytes(self) -> int:
        return self.shard_bytes * self.shards

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens


def layer_pages(kv_cache_config: KVCacheConfig) -> list[tuple[int, int]]:
    """How many layers there are with pages of how many bytes, in the order of the engine's tensors.

    The scheduler's copy of the config has one spec for all layers of a group, that of the first tensor, though pages of
    the others may differ in size. Theirs is taken from where they lie; padding, if they have any, counts with them.
    """
    tensors = kv_cache_config.kv_cache_tensors
    # Either the pages of a layer follow each other, or the layers of a page do: the smaller stride is one layer's page.
    pages = [(len(tensor.layers), min(tensor.layer_stride, tensor.block_stride)) for tensor in tensors]
    if pages:
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        first = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
        pages[0] = (pages[0][0], first.unpadded_page_size_bytes)
    return pages


def page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a page over all layers of one rank."""
    return sum(layers * size for layers, size in layer_pages(kv_cache_config))
