"""Natural English and its continuation: no facts to find, but the distribution of every next token to keep."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document
from stepwell.fidelity.tasks.texts.prose import prose
from stepwell.fidelity.text import Text


@dataclass(frozen=True, slots=True)
class Nat:
    """`steps`: tokens of the continuation."""

    steps: int = 64
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        wanted, characters = tokens + self.steps, 6 * (tokens + self.steps)
        while len(ids := text.encode(prose(random, characters), first=True).ids) < wanted:
            characters *= 2
        return Document(ids[:tokens], ids[tokens:wanted], (), intensity=0)
