"""Common parts of tasks: their interface, text with marked facts, and filling a prompt up to a length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Protocol

from stepwell.errors import ConfigError
from stepwell.fidelity.document import Document, Field
from stepwell.fidelity.text import Encoded, Text

Span = tuple[int, int]


class FidelityTask(Protocol):
    """Makes documents; the same random state gives the same one."""

    @property
    def blind(self) -> bool:
        """The task cannot tell good policies from bad ones, and is there to show that."""

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        """A document with exactly `tokens` tokens of prompt, cut off at its beginning. Raises ConfigError SW-128 if
        that is too short for the task."""


@dataclass(slots=True)
class Draft:
    """Text that grows and remembers the characters of its marked parts."""

    text: str = ""
    marks: list[tuple[str, str, Span]] = field(default_factory=list)

    def add(self, text: str, kind: str = "", name: str = "") -> Draft:
        """Adds text. `kind`: not empty for a part that counts."""
        start = len(self.text)
        self.text += text
        if kind:
            self.marks.append((kind, name, (start, len(self.text))))
        return self

    def fields(self, encoded: Encoded, sources: Sequence[tuple[Span, ...]] = ()) -> tuple[Field, ...]:
        """The marked parts, as tokens of the encoded text. `sources`: one for each of them, or none at all."""
        found = []
        for at, (kind, name, (start, stop)) in enumerate(self.marks):
            first, last = encoded.span(start, stop)
            found.append(Field(kind, name, first, last, self.text[start:stop], sources[at] if sources else ()))
        return tuple(found)


def fill(text: Text, units: Sequence[str], tokens: int, around: str = "") -> int:
    """Number of leading `units` that make at least `tokens` tokens together with `around`; all if they do not."""
    room = tokens - text.count(around)
    count = min(len(units), bisect_left(list(accumulate(text.count(unit) for unit in units)), room) + 1)
    while count < len(units) and len(text.encode("".join(units[:count]) + around, first=True).ids) < tokens:
        count += 1
    return count


def spans_of(encoded: Encoded, pieces: Iterable[str]) -> list[Span]:
    """The tokens of pieces that follow each other from the first character on; (0, 0) for one that was cut off."""
    spans, start = [], 0
    for piece in pieces:
        spans.append(span_of(encoded, start, piece))
        start += len(piece)
    return spans


def span_of(encoded: Encoded, start: int, piece: str) -> Span:
    """The same of a piece that begins at this character."""
    try:
        return encoded.span(start, start + len(piece))
    except ValueError:
        return 0, 0


def too_short(task: str, tokens: int, why: str) -> ConfigError:
    return ConfigError(
        "SW-128",
        what=f"the task {task} does not fit into {tokens} tokens",
        why=why,
        fix="ask for longer prompts (--lengths) or for fewer facts",
    )
