"""The first message of every connection: who is there, and which KV it has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stepwell.block.facts import MAX_FACTS
from stepwell.protocol.base import Message, Numbers
from stepwell.protocol.limits import MAX_FLAGS, MAX_GROUPS

Word = Annotated[str, msgspec.Meta(max_length=64)]


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """KV of layers that keep it alike. `kind`: how ("full", "sliding_window", "mla", "recurrent", or the engine's own
    word). `heads`, `head_size`: of each layer on one rank; 0 where a layer has none, or the layers differ. `dtype`: as
    it is stored. `block_tokens`: tokens of a block that have their KV in it. `shard_bytes`: bytes of the shard that are
    this group's; where shards are of one group each, of all that a block has of it. `span`: tokens of a window or of a
    chunk. `resume_bytes`: of the shards that a request needs of it at most which goes on behind a block, where these
    are not those of every block before it."""

    kind: Word
    layers: int
    heads: int
    head_size: int
    dtype: Word
    block_tokens: int
    shard_bytes: int
    span: int = 0
    resume_bytes: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} of {self.span}" if self.span else self.kind

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a shard, where every token is needed."""
        return self.shard_bytes // max(1, self.block_tokens)


class Hello(Message, frozen=True):
    """Who connects. A member passes a pidfd of itself as the message's only descriptor.

    `engine` is the same random name in all processes of one engine; `layout` is a 32-byte digest of how this member
    sees the KV layout; the scheduler adds `weights` and `model` (32-byte digests), `block_tokens` and, for people, a
    `label`. `options` are well settings that the engine's user asked for: a well that was started with others keeps its
    own and says so in `Welcome.warnings`. `acknowledges` are sessions of which nothing is left in this process: no
    copy, no slab. `pins`: a slab's pages stay in memory as long as this worker has it mapped, whatever the well does to
    them; it says `Unmapped` of each that was retired. `replicas`: so many consecutive ranks hold the same KV. It is one
    shard: rank r's is number r // replicas, of world // replicas, and the first rank that holds it writes it.

    Since protocol 5: `groups` of a scheduler's model (see `CacheGroup`); none where they are not known.
    `facts`: what the digests were made of, as `block.facts` writes it, for people; identity are the digests.
    `flags`: optional abilities by name; a well ignores those that it does not know.
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
    groups: Annotated[list[CacheGroup], msgspec.Meta(max_length=MAX_GROUPS)] = []
    facts: Annotated[bytes, msgspec.Meta(max_length=MAX_FACTS)] = b""
    flags: Annotated[list[Word], msgspec.Meta(max_length=MAX_FLAGS)] = []
