"""The digest chain: what the engine side calls a block before the well gives it a keyed name.

Each digest is BLAKE3 over the recipe, the parent's digest, the block's token ids and what else shapes its KV
(`extras`). It holds for one model and layout only together with a namespace. Digests confirm guessed prompts, so they
cross the socket and go nowhere else: never stored, never logged.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

from stepwell.block.facts import lp

RECIPE = b"stepwell digest 1"
"""Version of the recipe in this module. It is part of each digest, so that blocks of different recipes never meet."""

_NO_EXTRAS = lp(b"")

ROOT = bytes(32)
"""Parent of a prompt's first block."""


def salt_extras(salt: str | None) -> bytes:
    """Extras of a prompt's first block for a request's cache salt; later blocks inherit it through the chain."""
    return b"" if salt is None else lp(b"salt") + lp(salt.encode("utf-8", "surrogatepass"))


def adapter_extras(adapter: bytes | None) -> bytes:
    """Extras for a request that runs with an adapter: the 32-byte digest of its content. They follow the salt's."""
    return b"" if adapter is None else lp(b"adapter") + lp(adapter)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for ids outside 0 .. 2^32 - 1."""
    packed = array("I", tokens)
    assert packed.itemsize == 4, "platforms where C int is not 4 bytes are not supported"
    return packed.tobytes()


class Chain:
    """The digests of one growing token sequence, in blocks of `block_tokens`. Tokens are only ever appended.

    `digests` is the concatenation of 32-byte digests of all full blocks so far.
    """

    __slots__ = ("_extras", "_parent", "_rest", "block_tokens", "digests")

    def __init__(self, block_tokens: int, extras: bytes = b"") -> None:
        self.block_tokens = block_tokens
        self.digests = b""
        self._parent = ROOT
        self._extras = extras
        self._rest = b""

    def __len__(self) -> int:
        return len(self.digests) // 32

    @property
    def tokens(self) -> int:
        """Tokens taken in so far."""
        return len(self) * self.block_tokens + len(self._rest) // 4

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; every block that became full gets its digest."""
        data = self._rest + pack_tokens(tokens)
        size = self.block_tokens * 4
        full = len(data) // size * size
        made, parent, extras = [self.digests], self._parent, lp(self._extras)
        for at in range(0, full, size):  # a scheduler waits for this loop: nothing is called that need not be
            parent = blake3(RECIPE + parent + data[at : at + size] + extras).digest()
            made.append(parent)
            extras = _NO_EXTRAS
        if full:
            self._parent, self._extras, self.digests = parent, b"", b"".join(made)
        self._rest = data[full:]
