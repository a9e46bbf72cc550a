"""Unpredictable words and numbers."""

from __future__ import annotations

from random import Random

from stepwell.fidelity.text import Text

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "kl", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_PLENTY = 2


def words(text: Text, random: Random, count: int) -> list[str]:
    """`count` different words: from the model's vocabulary if it has plenty, else made of syllables."""
    known = text.words()
    if len(known) >= _PLENTY * count:
        return random.sample(known, count)
    made: dict[str, None] = {}
    while len(made) < count:
        made["".join(random.choice(_ONSETS) + random.choice(_VOWELS) for _ in range(random.randint(2, 4)))] = None
    return list(made)


def number(random: Random, digits: int = 5) -> str:
    return str(random.randrange(10 ** (digits - 1), 10**digits))
