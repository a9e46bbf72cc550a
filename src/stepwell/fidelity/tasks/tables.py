"""Tasks with a table of `word : number` lines, of which random keys are asked for, each with its number.

As many independent facts as keys are asked for, all over the prompt: the more, the harder for a policy that fetches
little (context intensity, arXiv 2604.08426).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import SINKS, Document, far
from stepwell.fidelity.tasks.base import Draft, fill, spans_of, too_short
from stepwell.fidelity.tasks.texts.words import number, words
from stepwell.fidelity.text import Text


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """A question about the table, and after its answer another question, of `asked` keys each: what mattered at the end
    of the prompt is not what matters then. Only the second answer counts."""

    asked: int = 4
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        keys = words(text, random, max(4 * self.asked, tokens // 4))
        table = {key: number(random) for key in keys}
        lines = [f"{key} : {value}\n" for key, value in table.items()]
        count = fill(text, lines, tokens)
        body = "".join(lines[:count])
        # The beginning is cut off to make room for the question, so nothing there is asked for. Nor is anything in the
        # window, as it would be without a question behind it.
        longest = _question(sorted(keys[:count], key=text.count)[-self.asked :])
        spans = spans_of(text.encode(body, first=True).last(tokens), lines[:count])
        spare = SINKS + text.count(longest)
        gold = [at for at in far(spans, tokens) if spans[at][0] >= spare]
        if len(gold) < 2 * self.asked:
            raise too_short("multi_turn", tokens, f"only {len(gold)} lines may be asked for, not {2 * self.asked}")
        chosen = random.sample(gold, 2 * self.asked)
        first, second = chosen[: self.asked], chosen[self.asked :]
        prompt = text.encode(body + _question([keys[at] for at in first]), first=True).last(tokens)
        spans = spans_of(prompt, lines[:count])
        draft = Draft("".join(lines[at] for at in first))
        draft.add(_question([keys[at] for at in second]))
        for at in second:
            draft.add(f"{keys[at]} : ").add(table[keys[at]], "digits", keys[at]).add("\n")
        continuation = text.encode(draft.text)
        fields = draft.fields(continuation, [(spans[at],) for at in second])
        return Document(prompt.ids, continuation.ids, fields, intensity=self.asked)


def _question(keys: list[str]) -> str:
    return f"\nQuestion: which numbers have {', '.join(keys)}?\nAnswer:\n"


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
