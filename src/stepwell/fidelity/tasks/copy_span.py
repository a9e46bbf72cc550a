"""Words in random order, hidden in English; then their beginning, which all of them must follow."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, may_be_gold
from stepwell.fidelity.tasks.base import Draft, too_short
from stepwell.fidelity.tasks.texts.hay import hide
from stepwell.fidelity.tasks.texts.words import words
from stepwell.fidelity.text import Text

_CUE = 4


@dataclass(frozen=True, slots=True)
class CopySpan:
    """`length`: words to follow."""

    length: int = 48
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        listed = words(text, random, _CUE + self.length)
        span = " ".join(listed)
        cue = " ".join(listed[:_CUE])
        prompt, [source] = hide(text, [span + "\n\n"], tokens, random, tail=cue)
        if not may_be_gold(source, len(prompt.ids)):
            raise too_short("copy_span", tokens, f"{len(listed)} words are not far from both of its ends")
        draft = Draft().add(" ").add(" ".join(listed[_CUE:]), "copy", "span")
        continuation = text.encode(draft.text)
        fields = draft.fields(continuation, [(source,)])
        return Document(prompt.ids, continuation.ids, fields, intensity=1)
