"""What the members of an engine say about themselves when they join."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What the scheduler says about its engine; digests are 32 bytes. `replicas`: consecutive ranks that hold the same
    KV, of `world`."""

    engine: str
    world: int
    shard_bytes: int
    block_tokens: int
    layout: bytes
    model: bytes
    label: str
    replicas: int = 1

    @property
    def shards(self) -> int:
        """Of a block."""
        return self.world // self.replicas


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker says about itself. `replicas`: consecutive ranks that hold the same KV."""

    engine: str
    rank: int
    world: int
    shard_bytes: int
    layout: bytes
    replicas: int = 1
