"""Prompts that share beginnings, as token ids: users who come back, and a mix of growing conversations and one-offs.

Seeded: the same text and seed give the same prompts. The text is the sources of Python's standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from stepwell.demo.documents import Encode, library_texts

TEXT_TOKENS = 400_000

ONCE = 0.15
"""Share of the mix's prompts that nobody asks again."""

OPEN = 5
"""Conversations of the mix that are open at a time."""

SYSTEM, FIRST, TURN, ONE_OFF, LONGEST = 160, (100, 400), (60, 400), (200, 900), 1500
"""Tokens of the mix: of the prompt that all conversations begin with; least and most of a first question, of what a
turn adds, of a one-off; and of a prompt, beyond which a conversation ends."""


def text(encode: Encode) -> list[int]:
    tokens: list[int] = []
    for _, source in library_texts():
        tokens += encode(source[:40_000])
        if len(tokens) > TEXT_TOKENS:
            break
    return tokens


def users(tokens: Sequence[int], count: int, shared: int, own: int) -> list[list[int]]:
    """A prompt for each user: `shared` tokens that all begin with, then `own` ones, from another place for each."""
    room = (len(tokens) - shared) // count
    assert room >= own
    return [[*tokens[:shared], *tokens[shared + user * room :][:own]] for user in range(count)]


def cyclic(count: int, rounds: int) -> list[int]:
    """One after the other, round and round."""
    return [user for _ in range(rounds) for user in range(count)]


def zipf(count: int, draws: int, seed: int) -> list[int]:
    """User of rank r with a chance proportional to 1 / r."""
    return Random(seed).choices(range(count), [1 / (rank + 1) for rank in range(count)], k=draws)


def mixed(tokens: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """`count` prompts: of conversations that grow turn by turn, take turns at random, and are followed by new ones when
    they have become long, all behind the same system prompt; and of one-offs between them."""
    random = Random(seed)

    def piece(least: int, most: int) -> list[int]:
        length = random.randint(least, most)
        at = random.randrange(len(tokens) - length)
        return list(tokens[at : at + length])

    system = piece(SYSTEM, SYSTEM)
    talks: list[list[int]] = []
    prompts: list[list[int]] = []
    for _ in range(count):
        if random.random() < ONCE:
            prompts.append(piece(*ONE_OFF))
            continue
        number = random.randrange(OPEN)
        if number >= len(talks):
            number = len(talks)
            talks.append([*system, *piece(*FIRST)])
        elif len(grown := talks[number] + piece(*TURN)) <= LONGEST:
            talks[number] = grown
        else:
            talks[number] = [*system, *piece(*FIRST)]
        prompts.append(list(talks[number]))
    return prompts
