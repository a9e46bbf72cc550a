"""Hides sentences between the paragraphs of English text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from stepwell.fidelity.document import SINKS, WINDOW
from stepwell.fidelity.tasks.base import Span, fill, span_of
from stepwell.fidelity.tasks.texts.prose import paragraphs
from stepwell.fidelity.text import Encoded, Text

_AROUND_DEPTH = 0.05
_SLACK = 8  # needles change how the text beside them is cut into tokens, if a little


def hide(
    text: Text, needles: Sequence[str], tokens: int, random: Random, depth: float | None = None, tail: str = ""
) -> tuple[Encoded, list[Span]]:
    """A prompt of `tokens` tokens that ends with `tail`, and the tokens of each needle in it. Needles keep their order:
    within a twentieth of `depth`, or anywhere; not within the first and last tokens if there is another place."""
    hay, characters = paragraphs(random, 6 * tokens), 6 * tokens
    while (count := fill(text, hay, tokens, "".join(needles) + tail)) == len(hay):
        characters *= 2
        hay = paragraphs(random, characters)
    hay = hay[:count]
    places = sorted(_places(text, hay, tokens, "".join(needles), tail, random, depth, len(needles)))
    pieces: list[str] = []
    starts: list[int] = []
    at = 0
    for place, needle in zip(places, needles, strict=True):
        pieces += hay[at:place]
        starts.append(sum(map(len, pieces)))
        pieces.append(needle)
        at = place
    prompt = text.encode("".join([*pieces, *hay[at:], tail]), first=True).last(tokens)
    return prompt, [span_of(prompt, start, needle) for start, needle in zip(starts, needles, strict=True)]


def _places(
    text: Text,
    hay: Sequence[str],
    tokens: int,
    needles: str,
    tail: str,
    random: Random,
    depth: float | None,
    count: int,
) -> list[int]:
    """Paragraphs before which needles are placed: away from the prompt's first and last tokens, if possible. A text
    that is too long is cut off at its beginning."""
    whole = text.encode("".join(hay) + tail, first=True)
    starts = list(accumulate(map(len, hay), initial=0))
    before = [span_of(whole, start, part)[0] for start, part in zip(starts, hay, strict=False)]
    total, slack = len(whole.ids), _SLACK + count
    gone = total + text.count(needles) - tokens
    clear = [at for at, ahead in enumerate(before) if ahead - gone >= SINKS + slack and total - ahead >= WINDOW + slack]
    clear = clear or [len(hay) - 1]
    if depth is not None:
        near = [at for at in clear if abs(before[at] - gone - depth * tokens) <= _AROUND_DEPTH * tokens]
        clear = near or [min(clear, key=lambda at: abs(before[at] - gone - depth * tokens))]
    return random.choices(clear, k=count)
