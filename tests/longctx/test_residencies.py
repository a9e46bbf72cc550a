"""Residencies against plain models of them, over random traces of steps, growth, moved rows and cropped ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.longctx.parts.residency.base import DecodeStep, Residency, ResidencyKind
from stepwell.longctx.parts.residency.hitrate import HitRate
from stepwell.longctx.parts.residency.lru import Fifo, LruPages
from stepwell.longctx.parts.residency.periodic import Keep, Periodic
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.shape import PageShape

SHAPE = PageShape(2, 3, 16, 64, 64)
KINDS: list[ResidencyKind] = [
    Fifo(),
    LruPages(),
    StepWindow(1),
    StepWindow(3),
    StepWindow(3, "lru"),
    HitRate(),
    HitRate(0.5),
    Periodic(1),
    Periodic(4),
    Keep(),
]


@dataclass
class Page:
    """What a plain model knows of a page: the steps in which it was selected, and the first it was there for."""

    came: int
    selected: list[int] = field(default_factory=list)
    warmed: int | None = None

    def last(self) -> int:
        return max([*self.selected, self.came - 1, *([] if self.warmed is None else [self.warmed])])

    def rate(self, now: int, decay: float) -> float:
        hits = sum(decay ** (now - step) for step in self.selected)
        return hits / sum(decay**age for age in range(now - self.came + 1))


def expected(kind: ResidencyKind, lane: list[Page], now: int, resident: set[int], selected: set[int], score):
    """Who may stay, with what it is ranked by."""
    may = resident | selected
    match kind:
        case Fifo():
            return {page: (page,) for page in may}
        case LruPages():
            return {page: (lane[page].last(), page) for page in may}
        case StepWindow(steps, eviction):
            may = {page for page in may if lane[page].last() > now - steps}
            return {page: (score[page],) if eviction == "mass" else (lane[page].last(), page) for page in may}
        case HitRate(decay):
            rates = {page: (lane[page].rate(now, decay or 1.0), page in resident, -page) for page in may}
            volume = len(resident) or len(selected)
            return {page: rates[page][:2] for page in sorted(may, key=rates.__getitem__, reverse=True)[:volume]}
        case Periodic(every) if (now + 1) % every == 0:
            return {page: (score[page],) for page in may}
        case Periodic() | Keep():
            return {page: (score[page],) for page in resident}
    raise AssertionError(kind)


def agree(ranks: list[float], keys: dict[int, tuple]) -> None:
    assert {page for page, rank in enumerate(ranks) if rank > -float("inf")} == set(keys)
    order = sorted(keys, key=lambda page: ranks[page])
    for one, other in pairwise(order):
        assert keys[one] < keys[other] if ranks[one] < ranks[other] else keys[one] == keys[other]


def kept(rank: torch.Tensor, room: int) -> torch.Tensor:
    """What the machine does."""
    top = rank.topk(min(room, rank.shape[1]), dim=-1)
    return torch.zeros_like(rank, dtype=torch.bool).scatter(-1, top.indices, top.values > -torch.inf)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_against_a_plain_model(kind: ResidencyKind, data: st.DataObject) -> None:
    chance = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    lanes, n, room = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 8))
    residency: Residency = kind.build(SHAPE)
    pages = [[Page(came=0) for _ in range(n)] for _ in range(lanes)]
    resident = torch.zeros(lanes, n, dtype=torch.bool)
    if data.draw(st.booleans()):
        warmth = torch.rand(lanes, n, generator=chance).masked_fill(
            torch.rand(lanes, n, generator=chance) < 0.1, -torch.inf
        )
        warm = residency.warm(warmth)
        assert torch.equal(warm > -torch.inf, warmth > -torch.inf)
        assert kind == Fifo() or torch.equal(warm, warmth)
        assert (
            kind != Fifo()
            or (kept(warm, 1).int().argmax(-1) == (warmth > -torch.inf).int().cumsum(-1).argmax(-1)).all()
        )
        resident = kept(warm, room)
    for now in range(data.draw(st.integers(1, 20))):  # decayed sums of so many steps are exact in float32
        match data.draw(st.sampled_from(["step"] * 6 + ["grow", "crop", "rows"])):
            case "grow":
                more = data.draw(st.integers(1, 3))
                resident = torch.nn.functional.pad(resident, (0, more), value=data.draw(st.booleans()))
                pages = [lane + [Page(came=now) for _ in range(more)] for lane in pages]
            case "crop":  # and others come in the place of some
                n, more = data.draw(st.integers(1, resident.shape[1])), data.draw(st.integers(0, 3))
                residency.crop(n)
                resident = torch.nn.functional.pad(resident[:, :n], (0, more), value=data.draw(st.booleans()))
                pages = [lane[:n] + [Page(came=now) for _ in range(more)] for lane in pages]
            case "rows":
                rows = data.draw(st.lists(st.integers(0, len(pages) - 1), min_size=1, max_size=4))
                residency.rows(torch.tensor(rows))
                resident = resident[rows]
                pages = [[Page(page.came, list(page.selected)) for page in pages[row]] for row in rows]
        lanes, n = resident.shape
        selected = torch.rand(lanes, n, generator=chance) < 0.3
        score = torch.rand(lanes, n, generator=chance)
        if data.draw(st.booleans()):
            score = (score * 3).round()
        for lane, marks in zip(pages, selected, strict=True):
            for page in marks.nonzero().flatten().tolist():
                lane[page].selected.append(now)
        rank = residency.rank(DecodeStep(now, selected, score, resident))
        assert rank.shape == (lanes, n) and rank.dtype == torch.float32
        for lane in range(lanes):
            here, chosen = (set(marks[lane].nonzero().flatten().tolist()) for marks in (resident, selected))
            agree(rank[lane].tolist(), expected(kind, pages[lane], now, here, chosen, score[lane].tolist()))
        before, resident = resident, kept(rank, room)
        if isinstance(kind, HitRate):  # of equal volume: the set never grows, whatever room there is
            grown = (resident & ~before).sum(-1) - (before & ~resident).sum(-1)
            assert ((grown <= 0) | ~before.any(-1)).all()


def run(kind: ResidencyKind, selections: torch.Tensor, scores: torch.Tensor, room: int) -> float:
    """The share of the selected pages that were resident."""
    residency = kind.build(SHAPE)
    resident = torch.zeros_like(selections[0])
    hits = 0
    for now, (selected, score) in enumerate(zip(selections, scores, strict=True)):
        hits += int((resident & selected).sum())
        resident = kept(residency.rank(DecodeStep(now, selected, score, resident)), room)
    return hits / int(selections.sum())


@pytest.fixture
def drift() -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that drifts: each page's logit is AR(1) over the steps; the 12 heaviest of 100 are selected."""
    chance = torch.Generator().manual_seed(7)
    logits = torch.randn(1, 100, generator=chance)
    steps = []
    for _ in range(200):
        logits = logits * 0.9 + torch.randn(1, 100, generator=chance) * (1 - 0.9**2) ** 0.5
        steps.append(logits)
    scores = (torch.stack(steps) * 2).softmax(-1)
    return kept(scores[:, 0], 12)[:, None], scores


def test_the_current_mass_forecasts_better_than_age(drift: tuple[torch.Tensor, torch.Tensor]) -> None:
    for room in (14, 20, 28):
        ahead, behind = (run(StepWindow(8, eviction), *drift, room=room) for eviction in ("mass", "lru"))
        assert ahead > behind
        assert run(StepWindow(8, "lru"), *drift, room=room) <= run(LruPages(), *drift, room=room) + 1e-9
        assert ahead > run(Fifo(), *drift, room=room) + 0.2


def test_longer_windows_hit_more(drift: tuple[torch.Tensor, torch.Tensor]) -> None:
    rates = [run(StepWindow(steps), *drift, room=100) for steps in (1, 2, 3, 4, 8)]
    assert rates == sorted(rates) and rates[-1] > rates[0] + 0.1


def test_a_window_keeps_no_more_than_its_steps() -> None:
    residency = StepWindow(2).build(SHAPE)
    marks = torch.eye(5, dtype=torch.bool)[:, None]
    resident = kept(residency.warm(torch.ones(1, 5)), 5)
    sizes = []
    for now in range(5):
        resident = kept(residency.rank(DecodeStep(now, marks[now], torch.ones(1, 5), resident)), 5)
        sizes.append(resident.nonzero()[:, 1].tolist())
    assert sizes == [[0, 1, 2, 3, 4], [0, 1], [1, 2], [2, 3], [3, 4]]


def test_what_is_resident_stays_whatever_its_score() -> None:
    marks = torch.tensor([[True, False]])
    step = DecodeStep(0, ~marks, torch.tensor([[-torch.inf, 1.0]]), marks)
    for kind in (Keep(), Periodic(2)):
        assert kept(kind.build(SHAPE).rank(step), 2).tolist() == [[True, False]]


def test_warm_again_after_steps() -> None:
    """A later turn's prompt: what it warms counts as used just now."""
    residency = StepWindow(2).build(SHAPE)
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    for now in range(5):
        residency.rank(DecodeStep(now, nobody, torch.ones(1, 4), nobody))
    resident = kept(residency.warm(torch.tensor([[0.1, 0.4, 0.3, -torch.inf, 0.2, 0.5]])), 3)
    assert resident.nonzero()[:, 1].tolist() == [1, 2, 5]
    nobody = torch.zeros(1, 6, dtype=torch.bool)
    for now, count in ((5, 3), (6, 0)):
        resident = kept(residency.rank(DecodeStep(now, nobody, torch.ones(1, 6), resident)), 3)
        assert resident.sum() == count
