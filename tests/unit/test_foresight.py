"""When a conversation is expected to go on, which requests are its turns, and when guessing is worth while: pure."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.block.namespace import BlockId
from stepwell.policies.prefetch import conversations as c
from stepwell.policies.prefetch.conversations import Conversations
from stepwell.policies.prefetch.record import FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_GUESSES, GuessRecord
from stepwell.policies.prefetch.rhythm import LONGEST_S, MIN_TIMES, Rhythm

TAG, OTHER = b"t" * 16, b"o" * 16


def rhythm(times: list[float]) -> Rhythm:
    made = Rhythm()
    for seconds in times:
        made.took(seconds)
    return made


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number.to_bytes(32, "big")) for number in numbers]


def turn(known: Conversations, *numbers: int, now: float = 0.0, tag: bytes = TAG) -> c.Conversation | None:
    blocks = ids(*numbers)
    at = next((n for n in reversed(range(len(blocks))) if known.ends(blocks[n])), None)
    return known.asked(tag, blocks, at, now)


# rhythm ---------------------------------------------------------------------------------------------------------------


@given(mean=st.floats(0.01, 3000), seed=st.integers(0, 1 << 32))
def test_who_is_regular_is_expected_about_then(mean: float, seed: int) -> None:
    dice = random.Random(seed)
    window = rhythm([mean * dice.uniform(0.9, 1.1) for _ in range(12)]).window
    assert window is not None
    assert mean / 1.5 < window.opens < mean < window.closes < mean * 1.7


@given(st.lists(st.floats(0, 1e5), max_size=20))
def test_a_window_lies_around_its_mean_or_is_none(times: list[float]) -> None:
    window = rhythm(times).window
    if window is not None:
        known = [seconds for seconds in times if seconds <= LONGEST_S]
        assert 0 < window.opens < window.closes
        assert window.opens <= max(known[-1], *known, 1e-3) and window.closes >= min(known)
    assert len(times) >= MIN_TIMES or window is None


def test_who_is_irregular_is_not_expected() -> None:
    assert rhythm([1, 100, 2, 300, 1, 50]).window is None


def test_a_long_pause_is_no_rhythm_and_begins_it_anew() -> None:
    assert rhythm([10, 10, 10, LONGEST_S + 1]).window is None
    assert rhythm([10, 10, 10, LONGEST_S + 1, 20]).window is None
    window = rhythm([10, 10, 10, LONGEST_S + 1, 20, 20]).window
    assert window is not None and 10 < window.opens < 20


def test_the_last_times_count_most() -> None:
    window = rhythm([10] * 20 + [30] * 20).window
    assert window is not None and window.opens < 30 < window.closes and window.opens > 15


# conversations --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_from_an_earlier_one_is_its_next_turn() -> None:
    known = Conversations()
    first = turn(known, 1, 2, 3)
    for parent, id in ((3, 4), (4, 5), (2, 9)):
        known.followed(*ids(parent, id))
    assert first is not None and len(first) == 5, "its answer belongs to it, what began elsewhere does not"
    assert turn(known, 1, 2, 3, 4, 7, now=10.0) is first
    assert (first.turn, first.prompt, first.last) == (2, 5, 10.0)
    assert turn(known, 1, 2, 8, now=11.0) is not first, "another one with the same beginning"
    assert turn(known, 1, 2, 3, 4, 7, now=20.0) is first, "the same prompt again"
    assert len(known) == 2


def test_of_two_that_go_on_from_one_the_first_is_its_next_turn() -> None:
    known = Conversations()
    first = turn(known, 1, 2)
    assert turn(known, 1, 2, 3) is first
    assert turn(known, 1, 2, 4) is not first


def test_prompts_of_no_block_and_those_too_long_are_nobodys() -> None:
    known = Conversations()
    assert turn(known) is None
    assert turn(known, *range(c.MAX_CHAIN + 1)) is None
    assert len(known) == known.ids == 0


def test_what_is_remembered_is_bounded_and_who_went_on_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "MAX_CONVERSATIONS", 8)
    monkeypatch.setattr(c, "MAX_BLOCKS", 40)
    known = Conversations()
    made = [turn(known, 100 * n, 100 * n + 1) for n in range(12)]
    assert [each.turn > 0 for each in made if each] == [False] * 4 + [True] * 8
    for n in range(100):
        known.followed(*ids(1101 + n, 1102 + n))
    assert known.ids == 40
    long = turn(known, *range(5000, 5030))
    assert long is not None and long.turn == 1 and known.ids <= 40


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2)), max_size=60))
def test_books_of_what_is_remembered(steps: list[tuple[int, int, int]]) -> None:
    """Turns, answers and clears in any order: ids are those of the chains, and what is forgotten is found no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c, "MAX_CONVERSATIONS", 3)
        patch.setattr(c, "MAX_BLOCKS", 12)
        known, made = Conversations(), []
        for what, size, start in steps:
            numbers = [10 * start + n for n in range(size)]
            if what < 2:
                made.append(turn(known, *numbers, tag=(TAG, OTHER)[what]))
            elif what == 2:
                known.followed(*ids(10 * start + size, 10 * start + size + 1))
            else:
                for _ in known.forget(TAG):
                    pass
                assert not [each for each in made if each and each.tag == TAG and each.turn]
            kept = {id(each): each for each in made if each is not None and each.turn}.values()
            assert len(known) == len(kept) <= 3
            assert known.ids == sum(len(each) for each in kept) <= 12


# the record -----------------------------------------------------------------------------------------------------------


def test_when_most_guesses_are_wrong_nothing_is_guessed_for_longer_and_longer() -> None:
    record, now, pauses = GuessRecord(), 0.0, []
    for _ in range(9):
        assert record.trusted(now)
        guesses = 0
        while record.trusted(now):
            record.ended(now, right=False)
            guesses += 1
        assert guesses == MIN_GUESSES
        pauses.append(record.until - now)
        now = record.until
    assert pauses == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(9)]


@given(st.integers(0, 1 << 32), st.floats(0.65, 1.0))
def test_when_most_are_right_it_goes_on(seed: int, share: float) -> None:
    record, dice = GuessRecord(), random.Random(seed)
    wrong = 0.0
    for n in range(300):
        wrong += 1 - share
        right = wrong < 1
        wrong -= not right
        record.ended(float(n), right=right)
        assert record.trusted(float(n)), dice
    assert math.isfinite(record.until)
