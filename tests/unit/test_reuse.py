"""What is learned of reuse, against exact ages and truths that are known."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.policies.cohorts import FINENESS, Cohorts
from stepwell.policies.past import MIN_REMEMBERED, REMEMBERED, Past, most_remembered
from stepwell.policies.reuse import BINS, CLASSES, EDGES, Reuse, best_rates, class_of, hazards

BEGINS = [0.0, *EDGES[1:].tolist()]  # of the bins


def bin_of(age: float) -> int:
    return bisect_right(BEGINS, age) - 1


@dataclass
class Exact:
    """The life table of the same uses, with a record for each."""

    alive: list[tuple[float, int, int]] = field(default_factory=list)  # used, row, blocks
    came: list[tuple[float, int, int]] = field(default_factory=list)
    gone: list[tuple[float, int, int, float, bool]] = field(default_factory=list)  # and when, and whether used again

    def add(self, now: float, row: int, blocks: int) -> None:
        self.alive.append((now, row, blocks))
        self.came.append((now, row, blocks))

    def take(self, now: float, at: int, again: bool) -> tuple[float, int, int]:
        one = self.alive.pop(at)
        self.gone.append((*one, now, again))
        return one

    def tables(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Blocks at risk in each bin, and used again in it, by class."""
        risk, again = np.zeros((CLASSES, BINS)), np.zeros((CLASSES, BINS))
        for used, row, blocks in self.alive:
            risk[row, : bin_of(now - used) + 1] += blocks
        for used, row, blocks, when, reused in self.gone:
            risk[row, : bin_of(when - used) + 1] += blocks
            again[row, bin_of(when - used)] += blocks * reused
        return risk, again


def tables(reuse: Reuse) -> tuple[np.ndarray, np.ndarray]:
    """The same, as it was learned."""
    return np.array(reuse._risk, np.float64), np.array(reuse._again, np.float64)


HISTORIES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.01, 0.3, 2.0, 50.0, 3e4]),  # seconds since the one before
        st.sampled_from(["use", "use", "use", "again", "again", "forget"]),
        st.integers(0, CLASSES - 1),
        st.integers(1, 9),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=120,
)


@given(HISTORIES)
def test_every_block_is_counted_once(history: list[tuple[float, str, int, int, float]]) -> None:
    """Against the exact table: no block is lost or made; an age may be taken for one part in FINENESS more, and so fall
    into the next bin."""
    reuse, exact = Reuse(), Exact()
    now = 0.0
    for gap, what, row, blocks, which in history:
        now += gap + 1e-6
        reuse.tick(now)
        if what == "use":
            reuse.used(now, row, blocks)
            exact.add(now, row, blocks)
        elif exact.alive:
            again = what == "again"
            taken = exact.take(now, int(which * len(exact.alive)), again)
            (reuse.used_again if again else reuse.forgotten)(*taken)
        alive = sum((np.array(cohort.alive) for cohort in reuse._cohorts._cohorts), np.zeros(CLASSES))
        assert alive.min() >= 0
        assert alive.tolist() == [sum(n for _, r, n in exact.alive if r == row) for row in range(CLASSES)]
    reuse.tick(now)
    risk, again = exact.tables(now)
    my_risk, my_again = tables(reuse)
    assert my_risk[:, 0].tolist() == risk[:, 0].tolist(), "all that was ever used was at risk at first"
    assert my_again.sum(1).tolist() == again.sum(1).tolist()
    for mine, real in ((my_risk, risk), (my_again, again)):
        if mine is my_again:  # as shares of ages from a bin on, to compare like with like
            mine, real = (np.cumsum(table[:, ::-1], axis=1)[:, ::-1] for table in (mine, real))
        assert (mine >= real).all(), "nothing is taken for younger than it is"
        assert (mine[:, 1:] <= real[:, :-1]).all(), "nor for older by more than a bin"
    assert ((my_again <= my_risk) & (my_risk >= 0)).all()


def lived(
    reuse: Reuse, gap: Callable[[random.Random], float], *, items: int = 400, uses: int = 40, row: int = 0
) -> None:
    """`items` that are each used again and again, `gap` seconds after the last time."""
    dice = random.Random(1)
    due = sorted((dice.random() * gap(dice), n) for n in range(items))
    last: dict[int, float] = {}
    for _ in range(items * 40):
        now, n = heapq.heappop(due)
        reuse.tick(now)
        if n in last:
            reuse.used_again(last[n], row, 1)
        reuse.used(now, row, 1)
        last[n] = now
        heapq.heappush(due, (now + gap(dice), n))


def test_reuse_at_random_has_one_hazard_at_all_ages() -> None:
    """Exponential gaps: of all that come of an age, the same part is used in each second."""
    reuse, mean = Reuse(), 30.0
    lived(reuse, lambda dice: dice.expovariate(1 / mean))
    found = hazards(*tables(reuse))[0]
    for bin in range(4, bin_of(3 * mean)):
        width = BEGINS[bin + 1] - BEGINS[bin]
        assert found[bin] == pytest.approx(1 - math.exp(-width / mean), rel=0.25, abs=0.01)
    rates = [reuse.rate(0, age) for age in (1.0, 5.0, 20.0, 60.0)]
    assert all(rate == pytest.approx(1 / mean, rel=0.3) for rate in rates), "so age says nothing"


def test_reuse_at_intervals_is_expected_more_the_nearer_it_is() -> None:
    reuse, period = Reuse(), 100.0
    lived(reuse, lambda dice: period * dice.uniform(0.98, 1.02))
    found = hazards(*tables(reuse))[0]
    due = bin_of(period)
    assert found[5 : due - 1].max() < 0.05
    assert found[due - 1 : due + 2].max() > 0.9
    rates = [reuse.rate(0, age) for age in (0.0, 40.0, 70.0, 85.0)]
    assert rates == sorted(rates) and rates[-1] > 1.7 * rates[0]
    assert rates[0] == pytest.approx(1 / period, rel=0.3)


def test_what_is_not_used_again_counts_by_its_age_only() -> None:
    """Half of all come back after 10 s, half never: the older, the less is to be expected."""
    reuse = Reuse()
    for n in range(3000):
        now = float(n)
        reuse.tick(now)
        reuse.used(now, 0, 1)
        if n >= 10 and n % 2:
            reuse.used_again(now - 10, 0, 1)
    assert reuse.rate(0, 9.0) > reuse.rate(0, 0.0) > 10 * reuse.rate(0, 40.0)


def test_what_is_forgotten_is_not_taken_for_unused() -> None:
    """Everything is used again after 100 s, but of every two one is forgotten after 20 s: those count as nothing."""
    told, untold = Reuse(), Reuse()
    for n in range(2000):
        now = float(n)
        for reuse in (told, untold):
            reuse.tick(now)
            reuse.used(now, 0, 1)
        if n >= 20 and n % 2:
            told.forgotten(now - 20, 0, 1)
        if n >= 100 and not n % 2:
            for reuse in (told, untold):
                reuse.used_again(now - 100, 0, 1)
    due = bin_of(100.0)
    for reuse, least, most in ((told, 0.9, 1.0), (untold, 0.4, 0.6)):
        found = hazards(*tables(reuse))[0]
        assert least < 1 - np.prod(1 - found[due - 1 : due + 2]) <= most


def test_classes_are_learned_apart_and_lean_on_all_together() -> None:
    reuse = Reuse()
    lived(reuse, lambda dice: dice.expovariate(1 / 5), row=3, items=100)
    lived_apart = reuse.rate(3, 2.0)
    assert reuse.rate(0, 2.0) == pytest.approx(lived_apart, rel=0.3), "of a class never seen, what is known of others"
    now = 1e6
    for _ in range(2000):
        now += 1
        reuse.tick(now)
        reuse.used(now, 0, 1)
    assert reuse.rate(0, 2.0) < lived_apart / 10
    assert reuse.rate(3, 2.0) == pytest.approx(lived_apart, rel=0.1)


def test_before_anything_is_known_the_order_is_that_of_lru() -> None:
    rates = Reuse().rates.tolist()
    for row in rates:
        assert row == rates[0]
        assert all(young > old > 0 for young, old in pairwise(row[1:]))


@pytest.mark.parametrize("seed", range(4))
def test_best_rates_are_the_best_of_all_times_to_give_up(seed: int) -> None:
    hazard = np.random.default_rng(seed).uniform(0, 0.9, (2, BINS)) ** 3
    found = best_rates(hazard)
    ends = [*BEGINS[1:], 2 * BEGINS[-1]]
    for row in range(2):
        for age in range(BINS):
            best = 0.0
            for last in range(age, BINS):
                alive, held = 1.0, 0.0
                for bin in range(age, last + 1):
                    held += alive * (ends[bin] - BEGINS[bin])
                    alive *= 1 - hazard[row, bin]
                best = max(best, (1 - alive) / held)
            assert found[row, age] == pytest.approx(best)


def test_a_rate_is_that_of_the_bin_of_the_age() -> None:
    reuse = Reuse()
    reuse.rates = 100.0 * np.arange(CLASSES)[:, None] + np.arange(BINS)
    for bin in range(BINS):
        assert reuse.rate(2, BEGINS[bin]) == 200 + bin
        assert reuse.rate(2, np.nextafter(BEGINS[bin], math.inf)) == 200 + bin
        if bin:
            assert reuse.rate(2, np.nextafter(BEGINS[bin], 0)) == 199 + bin
    assert reuse.rate(0, 1e12) == BINS - 1


def test_what_is_learned_is_believed_soon_and_then_now_and_then() -> None:
    reuse = Reuse()
    tables = []
    for n in range(2000):
        reuse.tick(float(n))
        reuse.used(float(n), 0, 5)
        if n:
            reuse.used_again(float(n - 1), 0, 5)
        if not tables or reuse.rates is not tables[-1]:
            tables.append(reuse.rates)
    assert tables[-1][0][bin_of(1.0)] > 0.5
    assert 20 < len(tables) < 100


def test_classes_go_by_powers_of_two() -> None:
    assert [class_of(n) for n in (1, 2, 3, 4, 7, 8, 1023, 1024, 10**9)] == [0, 1, 1, 2, 2, 3, 9, 10, 10]
    assert CLASSES == 11


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([0.001, 0.1, 1.0, 37.0, 600.0]))
def test_cohorts_are_few_and_fine(seed: int, gap: float) -> None:
    """Their number grows with the logarithm of time, and each is narrow for its age."""
    dice = random.Random(seed)
    cohorts = Cohorts(EDGES.tolist(), [[0] * BINS])
    now, most, checked = 0.0, 0, 0
    for n in range(2000):
        now += dice.expovariate(1 / gap)
        cohorts.advance(now)
        cohorts.add(now, 0, 1)
        most = max(most, len(cohorts))
        if n % 300 == 0:
            for cohort in cohorts._cohorts:
                checked += 1
                width = cohort.end - cohort.start
                assert width <= max(EDGES[0] / 2, (now - cohort.start) / FINENESS)
                assert BEGINS[cohort.bin] <= now - cohort.start
                assert cohort.bin == bin_of(now - cohort.start)
    bins = bin_of(now) + 1
    assert checked
    assert most <= 3 * FINENESS * bins / 2
    assert len(cohorts._crossings) <= 2 * len(cohorts) + 2 * BINS, "of joined ones, few are left"


# --- what is remembered


class Thing:
    def __init__(self, size: int) -> None:
        self.size, self.uses, self.used = size, 1, 0.0
        self.seconds, self.note, self.listed, self.held = 0.0, None, 0, False

    @property
    def evictable(self) -> bool:
        return self.held


def test_the_earliest_is_forgotten_first_unless_it_came_back() -> None:
    forgotten: list[Thing] = []

    def forget(thing: Thing) -> None:
        thing.uses = 0
        forgotten.append(thing)

    past = Past[Thing](9, forget)
    things = [Thing(3) for _ in range(8)]
    for thing in things[:3]:
        past.remember(thing)
    assert not forgotten
    past.came(things[0])  # its place is free for another
    past.remember(things[3])
    assert not forgotten
    things[1].used = 5.0  # it was used, and is remembered anew
    past.remember(things[1])
    past.remember(things[4])
    assert forgotten == [things[2]]
    past.remember(things[5])
    assert forgotten == [things[2], things[3]]
    things[1].used = 6.0  # it is asked for, and makes room for itself
    past.remember(things[6])
    assert forgotten == [things[2], things[3]], "it is in use"
    past.remember(things[1])
    assert forgotten == [things[2], things[3], things[4]]


def test_what_is_remembered_counts_once() -> None:
    """However often it comes and goes."""
    forgotten: list[Thing] = []
    past = Past[Thing](12, forgotten.append)
    one, other = Thing(8), Thing(4)
    for _ in range(5):
        past.remember(one)
        past.remember(other)
    assert not forgotten
    past.remember(Thing(1))
    assert forgotten == [one]


def test_what_is_forgotten_already_is_not_remembered() -> None:
    """A fleet's tier may settle what was asked for long ago."""
    forgotten: list[Thing] = []
    past = Past[Thing](3, forgotten.append)
    gone = Thing(3)
    gone.uses = 0
    for _ in range(2):
        past.remember(gone)
        past.remember(Thing(2))
    assert gone not in forgotten and not past.wrong([])


def test_what_is_remembered_is_bounded_by_blocks() -> None:
    assert most_remembered(10**6) == REMEMBERED * 10**6
    assert most_remembered(0) == MIN_REMEMBERED
    kept: set[int] = set()

    def forget(thing: Thing) -> None:
        thing.uses = 0
        kept.discard(id(thing))

    past = Past[Thing](100, forget)
    things = [Thing(1 + n % 7) for n in range(500)]
    for n, thing in enumerate(things):
        kept.add(id(thing))
        past.remember(thing)
        sizes = [one.size for one in things if id(one) in kept]
        assert sum(sizes) <= 100
        assert n < 30 or sum(sizes) > 100 - 7
    assert len(past._records) == len(kept)
