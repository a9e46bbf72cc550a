"""Selectors against plain counting, over random candidates: ties, -inf, single pages and none at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.longctx.parts.residency.hitrate import HitRate
from stepwell.longctx.parts.residency.periodic import Periodic
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.parts.select.base import Candidates, Selection, Selector
from stepwell.longctx.parts.select.choose import best, cap
from stepwell.longctx.parts.select.controls import RandomPages, Recent
from stepwell.longctx.parts.select.topk import TopK, TopP

SHARES = st.sampled_from([0.01, 0.0625, 0.25, 0.5, 1.0])


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    lanes, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n, page, hot = draw(st.sampled_from([1, 2, 3, 7, 40])), draw(st.sampled_from([1, 16])), draw(st.integers(0, 100))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(lanes, heads, group, n, generator=chance) * 3
    if draw(st.booleans()):
        logits = logits.round()  # ties
    barred = torch.rand(lanes, n, generator=chance) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    allowed = logits.masked_fill(barred[:, None, None], -torch.inf)
    always = torch.randn(lanes, heads, group, 1, generator=chance) + 2
    shares = torch.cat([always, allowed], -1).softmax(-1)
    mass = shares[..., 1:]
    score = mass.amax(2).sum(1).masked_fill(barred, -torch.inf)
    return Candidates(mass, shares[..., 0], score, n * page + hot, page)


SELECTORS = st.one_of(
    st.builds(TopK, SHARES),
    st.builds(Recent, SHARES),
    st.builds(RandomPages, SHARES, st.integers(0, 3)),
    st.builds(lambda mass, a, b: TopP(mass, min(a, b), max(a, b)), st.sampled_from([0.3, 0.9, 1.0]), SHARES, SHARES),
)


def lanes_of(selection: Selection) -> list[list[int]]:
    """What the machine reads of it; checks its form."""
    assert selection.pages.dtype == torch.int64 and selection.valid.dtype == torch.bool
    assert selection.pages.shape == selection.valid.shape
    lanes = []
    for pages, valid in zip(selection.pages.tolist(), selection.valid.tolist(), strict=True):
        count = sum(valid)
        assert valid == [True] * count + [False] * (len(valid) - count)
        assert pages[:count] == sorted(set(pages[:count])) and all(page >= 0 for page in pages)
        lanes.append(pages[:count])
    assert max(map(len, lanes)) == selection.pages.shape[1]
    return lanes


def selectable(case: Candidates) -> list[list[int]]:
    return [[page for page, score in enumerate(lane) if score > -float("inf")] for lane in case.score.tolist()]


@given(candidates(), SELECTORS)
def test_form_and_what_may_never_be_selected(case: Candidates, selector: Selector) -> None:
    chosen = lanes_of(selector.select(case))
    for pages, may in zip(chosen, selectable(case), strict=True):
        assert set(pages) <= set(may)
        assert bool(pages) == bool(may)
    assert lanes_of(selector.select(case)) == chosen


@given(candidates(), SHARES)
def test_sizes(case: Candidates, share: float) -> None:
    budget = min(max(1, round(share * case.tokens / case.page_tokens)), case.score.shape[1])
    for selector in (TopK(share), Recent(share), RandomPages(share)):
        for pages, may in zip(lanes_of(selector.select(case)), selectable(case), strict=True):
            assert len(pages) == min(budget, len(may))


@given(candidates(), SHARES)
def test_topk_leaves_nothing_better(case: Candidates, share: float) -> None:
    for lane, pages in enumerate(lanes_of(TopK(share).select(case))):
        left = set(selectable(case)[lane]) - set(pages)
        if pages and left:
            assert case.score[lane, pages].min() >= case.score[lane, list(left)].max()


@given(candidates(), SHARES)
def test_recent_are_the_newest(case: Candidates, share: float) -> None:
    for pages, may in zip(lanes_of(Recent(share).select(case)), selectable(case), strict=True):
        assert pages == may[len(may) - len(pages) :]


def covered(case: Candidates, lane: int, pages: list[int]) -> float:
    return (case.mass[lane, :, :, pages].sum(-1) + case.hot_mass[lane]).double().mean().item()


@given(candidates(), st.sampled_from([0.2, 0.5, 0.9, 0.99]), SHARES, SHARES)
def test_topp_is_the_smallest_set(case: Candidates, mass: float, one: float, other: float) -> None:
    floor, ceiling = min(one, other), max(one, other)
    least, most = (case.pages(share) for share in (floor, ceiling))
    for lane, pages in enumerate(lanes_of(TopP(mass, floor, ceiling).select(case))):
        may = selectable(case)[lane]
        assert min(least, len(may)) <= len(pages) <= most
        if len(pages) < min(most, len(may)):
            assert covered(case, lane, pages) >= mass - 1e-5
        if len(pages) > least:  # any set with one page less falls short; the best such set has the heaviest pages
            heaviest = sorted(may, key=lambda page: case.mass[lane, :, :, page].mean().item(), reverse=True)
            assert covered(case, lane, heaviest[: len(pages) - 1]) < mass + 1e-5


@given(candidates())
def test_topp_takes_more_for_more(case: Candidates) -> None:
    before: list[set[int]] = [set()] * case.score.shape[0]
    for mass in (0.1, 0.5, 0.8, 0.95, 1.0):
        now = [set(pages) for pages in lanes_of(TopP(mass, 0.0, 1.0).select(case))]
        assert all(less <= more for less, more in zip(before, now, strict=True))
        before = now


def test_topp_counts_what_is_hot() -> None:
    mass = torch.tensor([0.3, 0.02, 0.05, 0.03])[None, None, None]
    case = Candidates(mass, torch.tensor([[[0.6]]]), mass[0, 0], 64, 16)
    assert lanes_of(TopP(0.85, 0.0, 1.0).select(case)) == [[0]]
    assert lanes_of(TopP(0.92, 0.0, 1.0).select(case)) == [[0, 2]]
    assert lanes_of(TopP(0.5, 0.0, 1.0).select(case)) == [[0]]  # at least one page
    assert lanes_of(TopP(0.5, 0.75, 1.0).select(case)) == [[0, 2, 3]]
    assert lanes_of(TopP(1.0, 0.0, 0.5).select(case)) == [[0, 2]]


def test_random_is_even_and_changes_with_the_step() -> None:
    score = torch.ones(2, 50)
    case = Candidates(torch.empty(2, 1, 1, 0), torch.empty(2, 1, 1), score, 50, 1)
    drawn = [lanes_of(RandomPages(0.2, seed=1).select(replace(case, tokens=tokens))) for tokens in range(50, 450)]
    counts = torch.zeros(50)
    for lanes in drawn:
        counts[lanes[0]] += 1
    assert counts.sum() == sum(len(lanes[0]) for lanes in drawn)
    assert counts.min() > 0.75 * counts.mean() and counts.max() < 1.25 * counts.mean()
    assert all(one[0] != one[1] for one in drawn[:20])
    assert lanes_of(RandomPages(0.2, seed=2).select(case)) != drawn[0]


@given(candidates(), SELECTORS, st.integers(0, 10), st.integers(0, 2**31))
def test_cap(case: Candidates, selector: Selector, new_pages: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    resident = torch.rand(case.score.shape, generator=chance) < 0.5
    selection = selector.select(case)
    capped = lanes_of(cap(selection, resident, case.score, new_pages))
    for lane, (before, after) in enumerate(zip(lanes_of(selection), capped, strict=True)):
        here = {page for page in before if resident[lane, page]}
        absent, fetched = set(before) - here, set(after) - here
        assert here <= set(after) <= set(before) and len(fetched) == min(new_pages, len(absent))
        left = absent - fetched
        if left and fetched:
            assert case.score[lane, list(fetched)].min() >= case.score[lane, list(left)].max()


def test_more_than_there_is() -> None:
    assert lanes_of(best(torch.tensor([[0.1, -torch.inf, 0.3]]), 10)) == [[0, 2]]


def test_no_pages_at_all() -> None:
    nothing = torch.empty(2, 3, 2, 0)
    case = Candidates(nothing, torch.ones(2, 3, 2), torch.empty(2, 0), 100, 16)
    for selector in (TopK(0.1), TopP(0.9, 0.1, 0.2), Recent(0.1), RandomPages(0.1)):
        selection = selector.select(case)
        assert lanes_of(selection) == [[], []]
        assert lanes_of(cap(selection, torch.empty(2, 0, dtype=torch.bool), case.score, 3)) == [[], []]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopP(0.0, 0.1, 0.2),
        lambda: TopP(0.9, 0.3, 0.2),
        lambda: TopP(0.9, 0.0, 1.2),
        lambda: TopP(0.9, -0.1, 0.2),
        lambda: Recent(float("nan")),
        lambda: RandomPages(0.0),
        lambda: RandomPages(0.1, -1),
        lambda: StepWindow(0),
        lambda: StepWindow(2, "fifo"),  # type: ignore[arg-type]
        lambda: HitRate(0.0),
        lambda: HitRate(1.5),
        lambda: Periodic(0),
    ],
)
def test_figures_that_cannot_be(make) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.code == "SW-102"
