"""How many tokens and bytes an engine's pages, blocks and shards have."""

from __future__ import annotations

from dataclasses import dataclass


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
