"""From named facts to the 32 bytes that stand for them in a namespace, and to a text that people can compare.

What a namespace is made of (weights, effective config, layout) is gathered elsewhere as text; this module only fixes
how such facts become a digest, so that two sets of facts that differ anywhere can never yield the same bytes to hash.
Called by the engine adapters and by the weights fingerprint. The text decides nothing: it names what differs where
digests do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from blake3 import blake3

MAX_FACTS = 64 << 10
"""Bytes of the text of one member's facts."""

_DEEPEST, _SHOWN = 4, 80
_NUMBER = re.compile(r"\d+")
_facts: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


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


def facts_text(facts: Mapping[str, str]) -> bytes:
    """The facts as a JSON object of at most MAX_FACTS bytes, names sorted. If they have more, digests stand for the
    longest values; if that is not enough, the text is empty."""
    said = {_readable(name): _readable(value) for name, value in facts.items()}
    beyond = len(_json(said)) - MAX_FACTS
    for name in sorted(said, key=lambda name: len(said[name]), reverse=True):
        if beyond <= 0:
            break
        short = withheld(said[name])
        beyond -= len(_json(said[name])) - len(_json(short))
        said[name] = short
    return _json(said) if beyond <= 0 else b""


def withheld(value: str) -> str:
    """A text in place of a value that is too long, or may be confidential: equal only for equal values."""
    return f"<blake3 {blake3(_utf8(value)).hexdigest(16)}>"


def facts_of(text: bytes) -> dict[str, str]:
    """The facts that a peer has sent; none if the text is not of `facts_text`."""
    try:
        return _facts.decode(text) if len(text) <= MAX_FACTS else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Name, value here and value there of each fact that differs, in order of their names. Where both values are JSON
    objects: of each member that differs. Of facts whose names differ in numbers alone, such as those of layers, the
    first stands for all. Values are cut to what fits a line; "-" stands for one that is not there."""
    seen = set()
    for name in sorted(here.keys() | there.keys()):
        kind = _NUMBER.sub("", name)
        if here.get(name) != there.get(name) and kind not in seen:
            seen.add(kind)
            yield from _members(name, _value(here, name), _value(there, name), _DEEPEST)


_ABSENT = object()


def _value(facts: Mapping[str, str], name: str) -> Any:
    text = facts.get(name)
    if text is None:
        return _ABSENT
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def _members(name: str, here: Any, there: Any, depth: int) -> Iterator[tuple[str, str, str]]:
    if depth and isinstance(here, dict) and isinstance(there, dict):
        for key in sorted(here.keys() | there.keys()):
            one, other = here.get(key, _ABSENT), there.get(key, _ABSENT)
            if one != other:
                yield from _members(f"{name}.{key}", one, other, depth - 1)
    else:
        yield _line(name), _line(here), _line(there)


def _line(value: Any) -> str:
    text = "-" if value is _ABSENT else value if isinstance(value, str) else msgspec.json.encode(value).decode()
    cut = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _readable(text: str) -> str:
    """The text with lone surrogates written out: JSON has no place for them."""
    return text.encode("utf-8", "backslashreplace").decode()
