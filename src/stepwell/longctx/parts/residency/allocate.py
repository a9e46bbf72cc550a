"""One window for each layer and head within a budget: KVDrive's multiple-choice knapsack (arXiv 2605.18071)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from stepwell.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Allocation:
    """`choices`: the option of each item; `gain`, `cost`: their sums; `bound`: no allocation within the budget gains
    more."""

    choices: tuple[int, ...]
    gain: float
    cost: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Increment:
    """From one corner of an item's concave hull to the next."""

    item: int
    option: int
    gain: float
    cost: float


def allocate(gains: ArrayLike, costs: ArrayLike, budget: float) -> Allocation:
    """Chooses one option for each item so that the costs are within the budget and the gains as great as the greedy
    finds: along each item's concave hull, steepest increment first; an increment that does not fit ends its item.
    gains, costs: [items, options], finite, costs not negative.

    The gain is less than the best possible by at most the greatest gain of one increment, and by no more than `bound` -
    `gain`; it is the best possible if all increments fit. Raises ConfigError SW-102 if even the cheapest options exceed
    the budget, ValueError for other shapes or numbers.
    """
    gain, cost = np.asarray(gains, dtype=float), np.asarray(costs, dtype=float)
    if gain.ndim != 2 or gain.shape != cost.shape or not gain.shape[1]:
        raise ValueError(f"gains {gain.shape} and costs {cost.shape} are not items x options of one size")
    if not (np.isfinite(gain).all() and np.isfinite(cost).all() and (cost >= 0).all()):
        raise ValueError("gains and costs are finite, and costs not negative")
    hulls = [_hull(*item) for item in zip(gain, cost, strict=True)]
    choices = [hull[0] for hull in hulls]
    items = np.arange(len(choices))
    total_gain, total_cost = float(gain[items, choices].sum()), float(cost[items, choices].sum())
    if total_cost > budget:
        raise ConfigError(
            "SW-102",
            what=f"a budget of {budget:g} cannot be divided among {len(choices)} layers and heads",
            why=f"their smallest windows take {total_cost:g} together",
            fix="raise the budget, or offer smaller windows",
        )
    bound = None
    ended: set[int] = set()
    for step in _steepest_first(gain, cost, hulls):
        if step.item in ended:
            continue
        if total_cost + step.cost > budget:
            ended.add(step.item)
            if bound is None:  # the best of the relaxed problem, where options may be divided
                bound = total_gain + step.gain / step.cost * (budget - total_cost)
            continue
        choices[step.item] = step.option
        total_gain, total_cost = total_gain + step.gain, total_cost + step.cost
    return Allocation(tuple(choices), total_gain, total_cost, total_gain if bound is None else bound)


def _steepest_first(gain: np.ndarray, cost: np.ndarray, hulls: Sequence[list[int]]) -> list[_Increment]:
    """Increments of all items, steepest first. Those of one item stay in order: on a hull they only get flatter,
    rounding aside."""
    ranked = []
    for item, hull in enumerate(hulls):
        slope = np.inf
        for old, new in pairwise(hull):
            step = _Increment(item, new, gain[item, new] - gain[item, old], cost[item, new] - cost[item, old])
            slope = min(slope, step.gain / step.cost)
            ranked.append((slope, step))
    return [step for _, step in sorted(ranked, key=lambda each: -each[0])]


def _hull(gain: np.ndarray, cost: np.ndarray) -> list[int]:
    """Options on the upper concave hull, cheapest first: each gains more than the one before."""
    hull = [min(range(len(gain)), key=lambda option: (cost[option], -gain[option]))]
    while True:
        at = hull[-1]
        better = [option for option in range(len(gain)) if gain[option] > gain[at] and cost[option] > cost[at]]
        if not better:
            return hull
        slopes = {option: (gain[option] - gain[at]) / (cost[option] - cost[at]) for option in better}
        hull.append(max(better, key=lambda option: (slopes[option], cost[option])))
