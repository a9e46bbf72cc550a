"""Hides sentences between the paragraphs of English text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from stepwell.bench.fidelity.document import SINKS, WINDOW
from stepwell.bench.fidelity.tasks.base import Span, fit
from stepwell.bench.fidelity.tasks.prose import paragraphs
from stepwell.bench.fidelity.text import Encoded, Text

_AROUND_DEPTH = 0.05
_SLACK = 8  # text in one piece may have fewer tokens than in parts


def hide(
    text: Text, needles: Sequence[str], tokens: int, random: Random, depth: float | None = None, tail: str = ""
) -> tuple[Encoded, list[Span]]:
    """A prompt of at most `tokens` tokens that ends with `tail`, and the tokens of each needle in it. Needles keep
    their order: within a twentieth of `depth`, or anywhere; not within the first and last tokens if there is another
    place."""
    hay = paragraphs(random, 6 * tokens)
    hay = hay[: fit(text, hay, tokens, "".join(needles) + tail)]
    places = sorted(_places(text, hay, tail, len(needles), random, depth))
    pieces: list[str] = []
    starts: list[int] = []
    at = 0
    for place, needle in zip(places, needles, strict=True):
        pieces += hay[at:place]
        starts.append(sum(map(len, pieces)))
        pieces.append(needle)
        at = place
    prompt = text.encode("".join([*pieces, *hay[at:], tail]), first=True)
    spans = [prompt.span(start, start + len(needle)) for start, needle in zip(starts, needles, strict=True)]
    return prompt, spans


def _places(text: Text, hay: Sequence[str], tail: str, count: int, random: Random, depth: float | None) -> list[int]:
    """Before which paragraphs: those that keep clear of the prompt's first and last tokens, if there are any."""
    lengths = [text.count(part) for part in hay]
    before = list(accumulate(lengths, initial=0))
    after = sum(lengths) + text.count(tail)
    clear = [at for at, ahead in enumerate(before) if ahead >= SINKS + _SLACK and after - ahead >= WINDOW + _SLACK]
    clear = clear or [len(hay) // 2]
    if depth is not None:
        near = [at for at in clear if abs(before[at] - depth * after) <= _AROUND_DEPTH * after]
        clear = near or [min(clear, key=lambda at: abs(before[at] - depth * after))]
    return random.choices(clear, k=count)
