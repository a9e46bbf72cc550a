"""Cache groups: layers that keep their KV alike, what of it a request needs to go on, and how it is cut into shards.

full       every token of the prefix
window     the last `span` tokens, the next one included
chunk      the tokens of the chunk of `span` that the next one is in
state      no token, but the state behind the last one: recurrent, convolutional

An engine takes pages of the same bytes for all of its groups, of perhaps different numbers of tokens. A shard holds so
many pages of one group that every group has a whole number of shards in a block: its *parts*. Those of groups that need
every token are its *prefix*, all others its *tail*, which is stored and recalled only near the place where a request
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3

from stepwell.block.facts import lp


class GroupKind(StrEnum):
    FULL = "full"
    WINDOW = "sliding_window"
    CHUNK = "chunked"
    STATE = "recurrent"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One cache group. `page`: tokens of a page. `span`: see above; without meaning where every token is needed."""

    kind: GroupKind
    page: int
    span: int = 0

    def first_needed(self, end: int) -> int:
        """The first token that a request needs which goes on behind its first `end` tokens; `end` if it needs none."""
        match self.kind:
            case GroupKind.WINDOW:
                return min(end, max(0, end - self.span + 1))
            case GroupKind.CHUNK:
                return end // self.span * self.span
            case GroupKind.STATE:
                return max(0, end - 1)  # its page is that of the last token
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class Part:
    """A shard's place in a block: pages [first, first + pages) of those that `group` has for the block, of `page`
    tokens each. `number` counts the parts of a group."""

    group: int
    number: int
    page: int
    pages: int

    @property
    def first(self) -> int:
        return self.number * self.pages

    def digest(self, block: bytes) -> bytes:
        """The digest that this part of the block with this digest has."""
        return blake3(b"stepwell part 1" + lp(block) + bytes([self.group, self.number])).digest()

    def span(self, block: int, block_tokens: int) -> tuple[int, int]:
        """Its tokens: from the first on, up to the second."""
        start = block * block_tokens + self.first * self.page
        return start, start + self.pages * self.page

    def of_table(self, table: Sequence[int], block: int, block_tokens: int) -> Sequence[int]:
        """Its pages in the group's table of a request."""
        at = block * (block_tokens // self.page) + self.first
        return table[at : at + self.pages]


def parts_of(rules: Sequence[GroupRule], block_tokens: int) -> tuple[Part, ...]:
    """The parts of a block, those of a group after the other. Raises ValueError where a page, or the shard of another
    group, does not fit into a block a whole number of times."""
    if any(block_tokens % rule.page for rule in rules):
        raise ValueError(f"a block of {block_tokens} tokens is no multiple of every group's page")
    counts = [block_tokens // rule.page for rule in rules]
    pages = math.gcd(*counts)
    return tuple(
        Part(group, number, rule.page, pages)
        for group, (rule, count) in enumerate(zip(rules, counts, strict=True))
        for number in range(count // pages)
    )


def needed(
    rules: Sequence[GroupRule], parts: Sequence[Part], block_tokens: int, blocks: int, back: int = 0
) -> list[tuple[int, Part]]:
    """What a request needs of these parts which has its first `blocks` blocks and goes on `back` tokens before their
    end, block by block. What lies behind that is named, too: a later place may need it."""
    end = max(0, blocks * block_tokens - back)
    firsts = {part: rules[part.group].first_needed(end) for part in parts}
    start = min(firsts.values(), default=end) // block_tokens
    return [
        (block, part)
        for block in range(start, blocks)
        for part in parts
        if part.span(block, block_tokens)[1] > firsts[part]
    ]


def most_needed(rule: GroupRule, parts: Sequence[Part], block_tokens: int, back: int = 0) -> int:
    """The largest number of these parts, of one group, that a request needs of it which goes on behind a block, or
    `back` tokens before its end."""
    each = block_tokens // len(parts)
    ends = range(block_tokens, math.lcm(max(rule.span, 1), block_tokens) + 1, block_tokens)
    return max(end // each - rule.first_needed(max(0, end - back)) // each for end in ends)


def longest(
    rules: Sequence[GroupRule],
    parts: Sequence[Part],
    block_tokens: int,
    blocks: int,
    here: Collection[tuple[int, Part]],
    back: int = 0,
) -> int:
    """The largest number of blocks, at most `blocks`, at whose end a request can go on with the parts that are `here`,
    or `back` tokens before it; 0 if there is none."""
    for end in range(blocks, 0, -1):
        if all(place in here for place in needed(rules, parts, block_tokens, end, back)):
            return end
    return 0
