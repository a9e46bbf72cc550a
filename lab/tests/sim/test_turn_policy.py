"""Whose turn it is: nobody waits longer than under equal sharing, and short ones nearly as little as they can."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.sim.turns.policy import Turns

Arrivals = list[tuple[int, int]]
"""When each request comes, and how many bytes it wants, of a device that serves one in a unit of time."""


@st.composite
def arrivals(draw: st.DrawFn) -> Arrivals:
    gaps = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), min_size=1, max_size=12))
    at = 0
    return [(at := at + gap, nbytes) for gap, nbytes in gaps]


def served(requests: Arrivals) -> list[int]:
    """The request that each unit of time serves; -1: none waits."""
    turns, told = Turns(), []
    left = dict(enumerate(nbytes for _, nbytes in requests))
    while left:
        assert len(told) < 100_000
        for number, (at, nbytes) in enumerate(requests):
            if at == len(told):
                turns.wants(number, nbytes)
        request = turns.next()
        told.append(-1 if request is None else request)
        if request is not None:
            turns.served(request, 1)
            left[request] -= 1
            if not left[request]:
                del left[request]
    assert turns.next() is None
    return told


def shared(requests: Arrivals) -> list[Fraction]:
    """When each ends if all that have come share the device equally at each moment."""
    left = {n: Fraction(nbytes) for n, (_, nbytes) in enumerate(requests)}
    ends = [Fraction(0)] * len(requests)
    now = Fraction(0)
    while left:
        here = [n for n in left if requests[n][0] <= now]
        coming = [at for at, _ in requests if at > now]
        step = min([left[n] * len(here) for n in here] + [at - now for at in coming])
        for n in here:
            left[n] -= step / len(here)
            if not left[n]:
                del left[n]
                ends[n] = now + step
        now += step
    return ends


def ends_of(told: list[int], requests: Arrivals) -> list[int]:
    return [len(told) - told[::-1].index(n) for n in range(len(requests))]


@given(arrivals())
@example([(0, 1)] * 8 + [(2, 3), (10, 2)])
@settings(max_examples=400)
def test_nobody_ends_later_than_under_equal_sharing(requests: Arrivals) -> None:
    for end, fair in zip(ends_of(served(requests), requests), shared(requests), strict=True):
        assert end <= fair


@given(arrivals())
def test_the_device_is_idle_only_while_nobody_waits(requests: Arrivals) -> None:
    told = served(requests)
    ends = ends_of(told, requests)
    for now in (now for now, request in enumerate(told) if request < 0):
        assert not any(at <= now < end for (at, _), end in zip(requests, ends, strict=True))


@given(st.integers(1, 9), st.integers(1, 9))
def test_equal_ones_that_come_together_are_served_one_after_the_other(requests: int, nbytes: int) -> None:
    assert served([(0, nbytes)] * requests) == [n for n in range(requests) for _ in range(nbytes)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_of_those_that_come_together_the_shortest_is_first(sizes: list[int]) -> None:
    told = served([(0, nbytes) for nbytes in sizes])
    assert told == [n for nbytes, n in sorted((nbytes, n) for n, nbytes in enumerate(sizes)) for _ in range(nbytes)]


def test_a_long_one_ends_under_an_endless_stream_of_short_ones() -> None:
    stream = [(0, 10), *((2 * n, 2) for n in range(1000))]
    assert ends_of(served(stream), stream)[0] < 200, "with the shortest first it would be the last"


def serve(turns: Turns, same: Turns) -> None:
    """One byte to the same request. Both have the same places before and after, but for rounding."""
    request = same.next()
    assert request is not None
    assert turns.place(turns.next() or 0) == pytest.approx(same.place(request))
    for each in (turns, same):
        each.served(request, 1)
    waiting = [n for n in range(99) if n in same]
    assert [turns.place(n) for n in waiting] == pytest.approx([same.place(n) for n in waiting])


@given(arrivals(), st.data())
def test_what_is_wanted_piece_by_piece_or_not_any_more(requests: Arrivals, data: st.DataObject) -> None:
    turns, same = Turns(), Turns()
    for number, (_, nbytes) in enumerate(requests):
        piece, extra = data.draw(st.integers(1, nbytes)), data.draw(st.integers(1, 9))
        turns.wants(number, piece)
        turns.wants(number, nbytes - piece + extra)
        turns.wants(99, 5)
        turns.spares(number, extra)
        turns.spares(99, 5)
        same.wants(number, nbytes)
        serve(turns, same)
    while same.next() is not None:
        serve(turns, same)
    assert (vars(turns), turns.next()) == (vars(Turns()), None), "nothing is remembered of what has ended"


def test_those_below_zero_go_first() -> None:
    turns = Turns()
    for request, nbytes in ((7, 1), (-1, 9), (-2, 20), (3, 2)):
        turns.wants(request, nbytes)
    told = []
    while (request := turns.next()) is not None:
        assert request in turns
        turns.served(request, 1)
        told += [request] if request not in turns else []
    assert told == [-2, -1, 7, 3]


def test_little_is_remembered_while_others_come_and_go() -> None:
    turns = Turns()
    turns.wants(0, 100_000)
    for number in range(1, 1000):
        turns.wants(number, 3)
        turns.wants(-number, 2)
        for _ in range(8):
            request = turns.next()
            assert request is not None
            turns.served(request, 1)
    assert len(turns._ends) < 20
    for number in range(1000, 2000):  # nothing is served meanwhile
        turns.wants(number, 3)
        turns.spares(number, 3)
    assert len(turns._to_end) + len(turns._to_serve) < 500
    assert turns.next() == 0
    turns.wants(1, 3)
    place = turns.place(1)
    turns.spares(1, 3)
    turns.served(0, 1000)
    turns.wants(2, 3)
    assert turns.place(2) == pytest.approx(place + 1000), "the one that has waited all the time is not forgotten"
