"""What the members of an engine say about themselves when they join."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.protocol.messages import PROTOCOL, CacheGroup, Hello


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What the scheduler says about its engine; digests are 32 bytes. `replicas`: consecutive ranks that hold the same
    KV, of `world`. `facts`: what the digests were made of, as `block.facts.facts_text` writes it."""

    engine: str
    world: int
    shard_bytes: int
    block_tokens: int
    layout: bytes
    model: bytes
    label: str
    replicas: int = 1
    groups: tuple[CacheGroup, ...] = ()
    facts: bytes = b""

    @property
    def shards(self) -> int:
        """Number of shards that a block has."""
        return self.world // self.replicas

    def hello(self, weights: bytes, options: dict[str, str | int | float]) -> Hello:
        """What the scheduler says when it joins. `weights`: the digest that stands for them."""
        return Hello(
            PROTOCOL,
            "scheduler",
            self.engine,
            0,
            self.world,
            self.shard_bytes,
            self.layout,
            weights,
            self.model,
            self.block_tokens,
            self.label,
            options,
            replicas=self.replicas,
            groups=list(self.groups),
            facts=self.facts,
        )


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker says about itself. `replicas`: consecutive ranks that hold the same KV. `facts`: as above."""

    engine: str
    rank: int
    world: int
    shard_bytes: int
    layout: bytes
    replicas: int = 1
    facts: bytes = b""

    @property
    def shards(self) -> int:
        """Number of shards that a block has."""
        return self.world // self.replicas
