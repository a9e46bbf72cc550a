"""One number in English text: the control that is blind. Almost any policy passes it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, may_be_gold
from stepwell.fidelity.tasks.base import Draft, too_short
from stepwell.fidelity.tasks.texts.hay import hide
from stepwell.fidelity.tasks.texts.words import number
from stepwell.fidelity.text import Text

_ASKED = "The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey:
    depth: float | None = None
    blind: bool = True

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        key = number(random)
        prompt, [source] = hide(text, [f"{_ASKED} {key}.\n\n"], tokens, random, self.depth, tail=_ASKED)
        if not may_be_gold(source, len(prompt.ids)):
            raise too_short("passkey", tokens, "there is no place far from both of its ends")
        draft = Draft().add(" ").add(key, "digits", "key").add(".")
        continuation = text.encode(draft.text)
        return Document(prompt.ids, continuation.ids, draft.fields(continuation, [(source,)]), intensity=1)
