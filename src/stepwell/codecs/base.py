"""`Codec`: another form for the bytes of a shard on a tier, made from its slot when it is written and undone when it is
read. Host memory always holds what engines read."""

from __future__ import annotations

from typing import Protocol

from stepwell.io.memory import Bytes


class Codec(Protocol):
    """Without state: its calls come from threads of a tier. `number`: of `block.frame.CODECS`, in each frame's header.
    `parameters`: digest of all that decoding depends on, 16 bytes. Blocks of another codec or parameters are others:
    neither is found as the other, so what a codec loses is lost to those alone who chose it."""

    number: int
    parameters: bytes

    def serves(self, dtype: str) -> bool:
        """Shards of KV with this dtype, as engines name it ("bfloat16"), can be encoded."""

    def payload_bytes(self, raw: int) -> int:
        """Bytes that `raw` bytes are encoded to."""

    def encode(self, raw: Bytes) -> Bytes:
        """`payload_bytes(len(raw))` bytes; these may be `raw` itself."""

    def decode(self, payload: Bytes, into: Bytes) -> None:
        """Writes what the payload was made of, as far as the codec keeps it; any payload decodes to something."""


def name_of(codec: Codec) -> bytes:
    """What tells two codecs, or one with other parameters, apart in the identity of blocks."""
    return codec.number.to_bytes(2, "big") + codec.parameters
