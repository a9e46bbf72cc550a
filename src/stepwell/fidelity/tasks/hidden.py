"""Tasks with facts that are hidden in English text, which the continuation repeats."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, may_be_gold
from stepwell.fidelity.tasks.base import Draft, too_short
from stepwell.fidelity.tasks.texts.hay import hide
from stepwell.fidelity.tasks.texts.words import number, words
from stepwell.fidelity.text import Text

_ASKED = "The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey:
    """One number: the control that is blind. Almost any policy passes it."""

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


_CUE = 4


@dataclass(frozen=True, slots=True)
class CopySpan:
    """Words in random order; then their beginning, which all `length` others must follow."""

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


@dataclass(frozen=True, slots=True)
class VariableTracking:
    """Variables that are assigned to one another; then the value of each chain's last one. Each answer needs `hops` + 1
    lines of the prompt, of which only the first has the number."""

    chains: int = 6
    hops: int = 1
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        names = words(text, random, self.chains * (self.hops + 1))
        chains = [names[at :: self.chains] for at in range(self.chains)]
        values = [number(random) for _ in chains]
        # By hop first: a chain's lines stay in order, with those of all others between them.
        order = [(hop, chain) for hop in range(self.hops + 1) for chain in range(self.chains)]
        lines = [
            f"{chains[chain][hop]} = {chains[chain][hop - 1] if hop else values[chain]}\n\n" for hop, chain in order
        ]
        prompt, spans = hide(text, lines, tokens, random)
        if not all(may_be_gold(span, len(prompt.ids)) for span in spans):
            raise too_short("variable_tracking", tokens, f"{len(lines)} lines are not far from both of its ends")
        draft = Draft()
        sources = []
        for chain in random.sample(range(self.chains), self.chains):
            draft.add(f"{' = '.join(reversed(chains[chain]))} = ").add(values[chain], "digits", chains[chain][-1])
            draft.add("\n\n")
            sources.append(tuple(span for span, (_, of) in zip(spans, order, strict=True) if of == chain))
        continuation = text.encode(draft.text)
        fields = draft.fields(continuation, sources)
        return Document(prompt.ids, continuation.ids, fields, intensity=len(lines))


@dataclass(frozen=True, slots=True)
class MultiNeedle:
    """Sentences with a number each, `needles` of them, around `depth` (0: the beginning, 1: the end) or all over the
    prompt; then all of them once more."""

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
