"""The first message of every connection: who is there, and which KV it has."""

from __future__ import annotations

from stepwell.protocol.base import Message, Numbers


class Hello(Message, frozen=True):
    """Who connects. A member passes a pidfd of itself as the message's only descriptor.

    `engine` is the same random name in all processes of one engine; `layout` is a 32-byte digest of how this member
    sees the KV layout; the scheduler adds `weights` and `model` (32-byte digests), `block_tokens` and, for people, a
    `label`. `options` are well settings that the engine's user asked for: a well that was started with others keeps its
    own and says so in `Welcome.warnings`. `acknowledges` are sessions of which nothing is left in this process: no
    copy, no slab. `pins`: a slab's pages stay in memory as long as this worker has it mapped, whatever the well does to
    them; it says `Unmapped` of each that was retired. `replicas`: so many consecutive ranks hold the same KV. It is one
    shard: rank r's is number r // replicas, of world // replicas, and the first rank that holds it writes it.
    """

    protocol: int
    role: str  # "scheduler" | "worker" | "admin"
    engine: str = ""
    rank: int = 0
    world: int = 1
    shard_bytes: int = 0
    layout: bytes = b""
    weights: bytes = b""
    model: bytes = b""
    block_tokens: int = 0
    label: str = ""
    options: dict[str, str | int | float] = {}
    acknowledges: Numbers = []
    pins: bool = False
    replicas: int = 1
