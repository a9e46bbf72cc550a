"""From named facts to the 32 bytes that stand for them in a namespace.

What a namespace is made of (weights, effective config, layout) is gathered elsewhere as text; this module only fixes
how such facts become a digest, so that two sets of facts that differ anywhere can never yield the same bytes to hash.
Called by the engine adapters and by the weights fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3


def lp(data: bytes) -> bytes:
    """`data` behind its length in 4 bytes, big-endian: a concatenation of such pieces reads back in one way only.

    Raises OverflowError for 4 GiB or more.
    """
    return len(data).to_bytes(4, "big") + data


def digest_of(facts: Mapping[str, str]) -> bytes:
    """BLAKE3 (32 bytes) over the pairs of `facts`, sorted by key, each key and value length-prefixed. Independent of
    insertion order, process and machine. Any text is accepted, lone surrogates (as in file names that are no UTF-8)
    included."""
    hasher = blake3()
    for key, value in sorted((_utf8(key), _utf8(value)) for key, value in facts.items()):
        hasher.update(lp(key) + lp(value))
    return hasher.digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
