"""Sentences with a number each, hidden in English; then all of them once more."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, may_be_gold
from stepwell.fidelity.tasks.base import Draft, too_short
from stepwell.fidelity.tasks.texts.hay import hide
from stepwell.fidelity.tasks.texts.words import number, words
from stepwell.fidelity.text import Text


@dataclass(frozen=True, slots=True)
class MultiNeedle:
    """`needles` of them: around `depth` (0: the beginning, 1: the end), or all over the prompt."""

    needles: int = 8
    depth: float | None = None
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        codes = {word: number(random) for word in words(text, random, self.needles)}
        sentences = [f"The code of {word} is {code}.\n\n" for word, code in codes.items()]
        prompt, spans = hide(text, sentences, tokens, random, self.depth)
        if not all(may_be_gold(span, len(prompt.ids)) for span in spans):
            raise too_short("multi_needle", tokens, f"{self.needles} sentences are not far from both of its ends")
        order = random.sample(range(self.needles), self.needles)
        draft = Draft()
        listed = list(codes.items())
        for at in order:
            word, code = listed[at]
            draft.add(f"The code of {word} is ").add(code, "digits", word).add(".\n\n")
        continuation = text.encode(draft.text)
        fields = draft.fields(continuation, [(spans[at],) for at in order])
        return Document(prompt.ids, continuation.ids, fields, intensity=self.needles)
