"""A table of `word : number` lines; then random keys of it once more, each with its number.

As many independent facts as keys are asked for, all over the prompt: the more, the harder for a policy that fetches
little (context intensity, arXiv 2604.08426).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, far
from stepwell.fidelity.tasks.base import Draft, fill, spans_of, too_short
from stepwell.fidelity.tasks.texts.words import number, words
from stepwell.fidelity.text import Text


@dataclass(frozen=True, slots=True)
class KVTable:
    """`asked`: keys that the continuation lists."""

    asked: int = 16
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        keys = words(text, random, max(8, tokens // 5))
        table = {key: number(random) for key in keys}
        lines = [f"{key} : {value}\n" for key, value in table.items()]
        count = fill(text, lines, tokens)
        prompt = text.encode("".join(lines[:count]), first=True).last(tokens)
        spans = spans_of(prompt, lines[:count])
        gold = far(spans, len(prompt.ids))
        if len(gold) < self.asked:
            raise too_short("kvtable", tokens, f"only {len(gold)} lines may be asked for, not {self.asked}")
        asked = random.sample(gold, self.asked)
        draft = Draft()
        for at in asked:
            draft.add(f"{keys[at]} : ").add(table[keys[at]], "digits", keys[at]).add("\n")
        continuation = text.encode(draft.text)
        fields = draft.fields(continuation, [(spans[at],) for at in asked])
        return Document(prompt.ids, continuation.ids, fields, intensity=self.asked)
