"""Variables that are assigned to one another, hidden in English; then the value of each chain's last one. Each answer
needs `hops` + 1 lines of the prompt, of which only the first has the number."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from stepwell.fidelity.document import Document, may_be_gold
from stepwell.fidelity.tasks.base import Draft, too_short
from stepwell.fidelity.tasks.texts.hay import hide
from stepwell.fidelity.tasks.texts.words import number, words
from stepwell.fidelity.text import Text


@dataclass(frozen=True, slots=True)
class VariableTracking:
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
