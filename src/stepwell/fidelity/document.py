"""Documents of tasks: a prompt, its continuation, and the facts in it that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SINKS, WINDOW = 4, 64
"""Tokens that every policy has at hand: the first and the last ones of a prompt. No fact lies there."""


@dataclass(frozen=True, slots=True)
class Field:
    """A fact. `start` to `stop`: its tokens in the continuation; `gold`: its text, as it stands there; `source`: the
    prompt's tokens that tell it, one span for each record that is needed, or none where nothing is known of that."""

    kind: str
    name: str
    start: int
    stop: int
    gold: str
    source: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A document. `intensity`: independent facts of the prompt that the continuation needs."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    fields: tuple[Field, ...]
    intensity: int

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    def gold_positions(self) -> list[int]:
        """Positions in the continuation of tokens that belong to fields; ascending."""
        return sorted({at for field in self.fields for at in range(field.start, field.stop)})


def may_be_gold(span: tuple[int, int], tokens: int) -> bool:
    """Whether tokens [start, stop) of a prompt of so many tokens are outside what every policy has at hand."""
    return span[0] >= SINKS and span[1] <= tokens - WINDOW


def far(spans: Sequence[tuple[int, int]], tokens: int) -> list[int]:
    """Indexes of the records that may be gold."""
    return [at for at, span in enumerate(spans) if may_be_gold(span, tokens)]
