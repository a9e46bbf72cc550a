"""Cache groups: what of a prefix each needs, against an oracle that asks every token which others it attends to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.block.groups import GroupKind, GroupRule, Part, longest, most_needed, needed, parts_of


def attends(rule: GroupRule, token: int, other: int) -> bool:
    """Whether `token` looks at `other`, as papers say of each kind of attention."""
    match rule.kind:
        case GroupKind.WINDOW:
            return token - rule.span < other <= token
        case GroupKind.CHUNK:
            return other <= token and other // rule.span == token // rule.span
        case _:
            return other <= token


def wanted(rule: GroupRule, end: int) -> set[int]:
    """Tokens of the first `end` that any later one looks at; of a state, the one behind which it is."""
    if rule.kind is GroupKind.STATE:
        return set(range(end)[-1:])
    later = range(end, end + max(rule.span, 1) + 1)
    return {other for other in range(end) if any(attends(rule, token, other) for token in later)}


PAGES = st.sampled_from([4, 8, 16])
RULES = st.one_of(
    st.builds(GroupRule, st.sampled_from([GroupKind.FULL, GroupKind.STATE]), PAGES),
    st.builds(GroupRule, st.sampled_from([GroupKind.WINDOW, GroupKind.CHUNK]), PAGES, st.integers(1, 70)),
)
MODELS = st.lists(RULES, min_size=1, max_size=4)
BLOCKS = st.sampled_from([16, 32, 48])


@given(RULES, st.integers(0, 200))
def test_the_first_needed_token(rule: GroupRule, end: int) -> None:
    tokens = wanted(rule, end)
    assert tokens == set(range(rule.first_needed(end), end))


@given(MODELS, BLOCKS)
def test_parts_make_up_each_groups_block_in_shards_of_as_many_pages(rules: list[GroupRule], block_tokens: int) -> None:
    parts = parts_of(rules, block_tokens)
    assert len({part.pages for part in parts}) == 1
    for group, rule in enumerate(rules):
        spans = [part.span(3, block_tokens) for part in parts if part.group == group]
        assert spans[0][0] == 3 * block_tokens and spans[-1][1] == 4 * block_tokens
        assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
        table = list(range(1000))
        pages = [page for part in parts if part.group == group for page in part.of_table(table, 3, block_tokens)]
        assert pages == list(range(3 * block_tokens // rule.page, 4 * block_tokens // rule.page))


@given(MODELS, BLOCKS, st.integers(0, 6))
def test_what_is_needed_of_a_prefix(rules: list[GroupRule], block_tokens: int, blocks: int) -> None:
    parts = parts_of(rules, block_tokens)
    end = blocks * block_tokens
    tokens = [wanted(rule, end) for rule in rules]
    expected = [
        (block, part)
        for block in range(blocks)
        for part in parts
        if not tokens[part.group].isdisjoint(range(*part.span(block, block_tokens)))
    ]
    assert needed(rules, parts, block_tokens, blocks) == expected


@given(MODELS, BLOCKS, st.data())
def test_the_longest_prefix_that_all_groups_can_serve(
    rules: list[GroupRule], block_tokens: int, data: st.DataObject
) -> None:
    parts, blocks = parts_of(rules, block_tokens), 5
    places = [(block, part) for block in range(blocks) for part in parts]
    here = data.draw(st.sets(st.sampled_from(places)))
    tokens = [
        {token for block, part in here if part.group == group for token in range(*part.span(block, block_tokens))}
        for group in range(len(rules))
    ]
    serves = [
        end
        for end in range(1, blocks + 1)
        if all(wanted(rule, end * block_tokens) <= tokens[group] for group, rule in enumerate(rules))
    ]
    assert longest(rules, parts, block_tokens, blocks, here) == max(serves, default=0)


def test_a_page_that_does_not_fit_into_a_block() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        parts_of([GroupRule(GroupKind.FULL, 16), GroupRule(GroupKind.WINDOW, 24, 48)], 32)


def test_parts_of_a_block_have_digests_of_their_own() -> None:
    parts = [Part(group, number, 16, 1) for group in range(3) for number in range(3)]
    digests = {part.digest(block) for part in parts for block in (bytes(32), bytes([1] * 32))}
    assert len(digests) == 18


@given(RULES, BLOCKS)
def test_the_most_that_is_needed_of_a_tail(rule: GroupRule, block_tokens: int) -> None:
    if rule.kind is not GroupKind.FULL:
        parts = parts_of([rule], block_tokens)
        each = [len(needed([rule], parts, block_tokens, blocks)) for blocks in range(1, 20)]
        assert most_needed(rule, parts, block_tokens) == max(each)
