"""Windows within a budget, against every allocation there is; hit curves, against counting."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.longctx.kv.profile import hit_curve
from stepwell.longctx.parts.residency.allocate import allocate


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, float]:
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    numbers = st.integers(0, 20) if draw(st.booleans()) else st.floats(0, 20, width=16)
    gains, costs = (
        np.array([[draw(numbers) for _ in range(shape[1])] for _ in range(shape[0])], dtype=float) for _ in range(2)
    )
    return gains, costs, draw(st.floats(0, 80))


def every_allocation(gains: np.ndarray, costs: np.ndarray, budget: float) -> list[float]:
    """The gains of all within the budget."""
    items = range(len(gains))
    found = []
    for choice in product(range(gains.shape[1]), repeat=len(gains)):
        if sum(costs[item, choice[item]] for item in items) <= budget:
            found.append(sum(gains[item, choice[item]] for item in items))
    return found


@given(problems())
def test_against_every_allocation(problem: tuple[np.ndarray, np.ndarray, float]) -> None:
    gains, costs, budget = problem
    possible = every_allocation(gains, costs, budget)
    if not possible:
        with pytest.raises(ConfigError) as caught:
            allocate(gains, costs, budget)
        assert caught.value.code == "SW-102"
        return
    found = allocate(gains, costs, budget)
    best = max(possible)
    chosen = (np.arange(len(gains)), list(found.choices))
    assert found.cost == pytest.approx(costs[chosen].sum()) and found.cost <= budget + 1e-9
    assert found.gain == pytest.approx(gains[chosen].sum())
    assert found.gain <= best + 1e-9 and best <= found.bound + 1e-9
    # The stated gap: at most one increment, and no increment gains more than an item's whole range does.
    assert found.bound - found.gain <= np.ptp(gains, axis=1).max() + 1e-9


@given(problems())
def test_room_for_all_is_the_best(problem: tuple[np.ndarray, np.ndarray, float]) -> None:
    gains, costs, _ = problem
    found = allocate(gains, costs, costs.max() * len(costs))
    assert found.gain == pytest.approx(gains.max(1).sum()) and found.bound == pytest.approx(found.gain)


def test_budget_goes_where_it_helps() -> None:
    """Two heads with equal windows: one hits from the start, the other needs four steps."""
    gains = [[60.0, 62.0, 63.0, 64.0], [10.0, 30.0, 50.0, 70.0]]
    costs = [[1.0, 2.0, 3.0, 4.0]] * 2
    assert allocate(gains, costs, 5.0).choices == (0, 3)
    assert allocate(gains, costs, 5.0).gain == 130.0
    assert allocate(gains, costs, 2.0).choices == (0, 0)
    assert allocate(gains, costs, 8.0).choices == (3, 3)


def test_what_does_not_fit_ends_its_item() -> None:
    found = allocate([[0.0, 10.0, 10.5]], [[0.0, 10.0, 11.0]], 5.0)
    assert (found.choices, found.gain, found.cost, found.bound) == ((0,), 0.0, 0.0, 5.0)


def test_the_bound_is_that_of_the_first_misfit() -> None:
    found = allocate([[0.0, 10.0], [0.0, 1.0], [0.0, 0.1]], [[0.0, 10.0], [0.0, 6.0], [0.0, 5.0]], 9.0)
    assert (found.choices, found.gain, found.bound) == ((0, 1, 0), 1.0, 9.0)


def test_many_items_are_near_the_bound() -> None:
    chance = np.random.default_rng(3)
    gains = np.sort(chance.random((270, 5)), axis=1)
    costs = np.tile(np.array([1.0, 2.0, 3.0, 4.0, 8.0]), (270, 1))
    for budget in (300, 700, 1200):
        found = allocate(gains, costs, budget)
        assert found.cost <= budget and found.gain > 0.995 * found.bound


@pytest.mark.parametrize(
    "gains, costs", [([1.0], [1.0]), ([[1.0]], [[1.0, 2.0]]), ([[np.nan]], [[1.0]]), ([[1.0]], [[-1.0]]), ([[]], [[]])]
)
def test_what_is_no_problem(gains, costs) -> None:
    with pytest.raises(ValueError):
        allocate(gains, costs, 1.0)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12))
def test_hit_curve_counts(seed: int, lanes: int, n: int) -> None:
    chance = np.random.default_rng(seed)
    selections = chance.random((14, lanes, n)) < chance.random()
    windows = (1, 3, 2, 8)
    curve = hit_curve(selections, windows)
    for at, lane in product(range(len(windows)), range(lanes)):
        hits = wanted = held = 0
        for step in range(8, 14):
            before = {page for past in selections[step - windows[at] : step, lane] for page in np.flatnonzero(past)}
            now = set(np.flatnonzero(selections[step, lane]))
            hits, wanted, held = hits + len(before & now), wanted + len(now), held + len(before)
        assert curve.hits[at, lane] == pytest.approx(hits / wanted if wanted else 1.0)
        assert curve.pages[at, lane] == pytest.approx(held / 6)


def test_hit_curve_needs_steps() -> None:
    for windows in ((4,), (0, 1)):
        with pytest.raises(ValueError):
            hit_curve(np.ones((4, 1, 3), dtype=bool), windows)
