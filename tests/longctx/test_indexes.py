"""Key indexes: the contract over each kind, and what makes them differ."""

from __future__ import annotations

import math
import os
from functools import cache
from itertools import pairwise

import pytest
import torch

from stepwell.errors import ConfigError
from stepwell.longctx.parts.index.base import IndexKind
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.index.landmark import MeanLandmark
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.index.rotated import GRIDS, RotatedKeys, padded, rotation
from stepwell.longctx.parts.index.stored import Growing
from stepwell.longctx.shape import PageShape
from tests.longctx.constructed import chosen, planted
from tests.longctx.contracts import IndexContract

KINDS: list[IndexKind] = [
    TrueKeys(),
    MinMax(),
    MeanLandmark(),
    MeanLandmark(4),
    RotatedKeys(1),
    RotatedKeys(2),
    RotatedKeys(4),
    RotatedKeys(2, centred=False),
]
CPU = torch.device("cpu")
TOKENS = int(os.environ.get("LONGCTX_TEST_TOKENS", 8192))  # 65536 is what our measurements used
SEEDS = range(4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestContract(IndexContract):
    pass


@cache
def found(kind: IndexKind, page: int, moved: int, needles: int, rho: float) -> float:
    """The share of the needles that are selected at 6.25 % of the context. `moved`: tokens of a page that is selected,
    1 for tokens."""
    shares = []
    for seed in SEEDS:
        case = planted(seed, needles=needles, rho=rho, tokens=TOKENS)
        index = kind.build(PageShape(1, 1, page, 128, 128))
        index.add(case.keys)
        shares.append(chosen(index, case, 0.0625, moved)[case.needles].float().mean().item())
    return sum(shares) / len(shares)


def test_one_smooth_needle_is_found_by_all() -> None:
    """Why such a test proves nothing."""
    for kind, moved in ((TrueKeys(), 1), (RotatedKeys(2), 16), (MinMax(), 16), (MeanLandmark(8), 16)):
        assert found(kind, 16, moved, 1, 0.9) == 1.0


def test_many_needles_tell_indexes_apart() -> None:
    tokens = {bits: found(RotatedKeys(bits), 16, 1, 16, 0.9) for bits in (1, 2, 4)}
    pages = found(RotatedKeys(2), 16, 16, 16, 0.9)
    corners = {page: found(MinMax(), page, page, 16, 0.9) for page in (16, 32, 128)}
    means = {page: found(MeanLandmark(), page, page, 16, 0.9) for page in (8, 32)}
    assert found(TrueKeys(), 16, 1, 16, 0.9) == 1.0
    assert tokens[4] >= tokens[2] >= 0.95 and tokens[2] > tokens[1] + 0.05
    assert tokens[2] > pages > corners[16] + 0.05
    assert corners[16] > corners[32] > corners[128] + 0.2
    assert means[8] > means[32] + 0.2


@pytest.mark.skipif(TOKENS > 8192, reason="in a longer context the budget holds the needle's page anyway")
def test_a_rough_needle_is_lost_by_corners() -> None:
    assert found(RotatedKeys(2), 16, 16, 1, 0.0) == 1.0
    assert found(MeanLandmark(), 16, 16, 1, 0.0) == 1.0
    assert found(MinMax(), 32, 32, 1, 0.0) <= 0.5


def test_landmarks_within_a_page_see_more_than_its_mean() -> None:
    assert found(MeanLandmark(8), 16, 16, 16, 0.9) > found(MeanLandmark(), 16, 16, 16, 0.9)


def test_centring_takes_outlier_channels_off() -> None:
    case = planted(1, needles=16, tokens=2048)
    keys = case.keys.clone()
    keys[..., :4] += torch.tensor([20.0, -15.0, 30.0, 10.0])
    exact = (case.query @ keys.mT).flatten()
    shape = PageShape(1, 1, 16, 128, 128)
    close = {}
    for centred in (True, False):
        index = RotatedKeys(2, centred).build(shape)
        index.add(keys)
        close[centred] = torch.corrcoef(torch.stack([index.score(case.query).flatten(), exact]))[0, 1]
    assert close[True] > 0.9 > 0.7 > close[False]


@pytest.mark.parametrize("dim", [13, 64, 80, 128])
def test_rotated_scores_follow_the_truth(dim: int) -> None:
    chance = torch.Generator().manual_seed(dim)
    keys = torch.randn(2, 2, 2048, dim, generator=chance) + torch.randn(2, 2, 1, dim, generator=chance) * 5
    query = torch.randn(2, 2, 3, dim, generator=chance)
    exact = query @ keys.mT
    # The distortion of a Lloyd-Max quantiser of a Gaussian is .3634, .1175 and .0095 of its variance.
    for bits, distortion in ((1, 0.3634), (2, 0.1175), (4, 0.0095)):
        index = RotatedKeys(bits).build(PageShape(2, 3, 16, dim, dim))
        index.add(keys)
        error = (index.score(query) - exact).square().mean() / (exact - exact.mean(-1, keepdim=True)).square().mean()
        assert 0.7 * distortion * dim / padded(dim) <= error <= 1.15 * distortion


def test_byte_tables_sum_what_the_codes_say() -> None:
    """The fast way is the same sum as unpacking the codes and multiplying."""
    from stepwell.longctx.parts.index.rotated import _grid
    from stepwell.longctx.parts.numbers import unpack

    chance = torch.Generator().manual_seed(3)
    keys, query = torch.randn(2, 3, 64, 24, generator=chance), torch.randn(2, 3, 5, 24, generator=chance)
    for bits in GRIDS:
        index = RotatedKeys(bits).build(PageShape(3, 5, 16, 24, 24))
        index.add(keys)
        points = _grid(bits, CPU)[0][unpack(index.used(0), bits, 32).long()] * index.used(1).float().unsqueeze(-1)
        plain = query @ rotation(24, CPU) @ points.mT + query @ keys.mean(2, keepdim=True).mT
        torch.testing.assert_close(index.score(query), plain, rtol=1e-4, atol=1e-4)


def test_size_of_rotated_keys() -> None:
    shape = PageShape(3, 3, 16, 64, 64)
    for bits in GRIDS:
        index = RotatedKeys(bits).build(shape)
        for pages in (5, 1, 1):  # the room in reserve is not counted
            index.add(torch.randn(2, 3, pages * 16, 64))
        assert index.nbytes == 2 * 3 * (7 * 16 * (64 * bits // 8 + 2) + 64 * 4)
    for kind, size in ((TrueKeys(), 64 * 16 * 4), (MinMax(), 64 * 2 * 2), (MeanLandmark(4), 64 * 4 * 2)):
        index = kind.build(shape)
        index.add(torch.randn(2, 3, 7 * 16, 64))
        assert index.nbytes == 2 * 3 * 7 * size


def test_rows_are_moved_seldom() -> None:
    """Adding page by page copies what is there a few times, not each time."""
    kept = Growing(torch.zeros(1, 1, 1, 4))
    places = set()
    for page in range(1000):
        kept.append(torch.full((1, 1, 1, 4), float(page)))
        places.add((kept.used.data_ptr(), kept.used.stride()))
    assert len({stride for _, stride in places}) <= 10
    assert kept.used[0, 0, 1:, 0].tolist() == list(map(float, range(1000)))


def test_keys_of_any_size_score_finitely() -> None:
    most = torch.finfo(torch.bfloat16).max
    keys = (torch.randint(0, 2, (1, 2, 64, 64), generator=torch.Generator().manual_seed(0)) * 2 - 1) * most
    for bits in GRIDS:
        for centred in (True, False):
            index = RotatedKeys(bits, centred).build(PageShape(2, 1, 16, 64, 64))
            index.add(keys.bfloat16())
            scores = index.score(torch.ones(1, 2, 1, 64))
            assert scores.isfinite().all() and scores.abs().max() > 1e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_corners_are_upper_bounds(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(11)
    keys = (torch.randn(2, 3, 32 * 16, 64, generator=chance) * 10.0 ** torch.arange(-3, 1).repeat(16)).to(dtype)
    query = torch.randn(2, 3, 4, 64, generator=chance)
    index = MinMax().build(PageShape(3, 4, 16, 64, 64))
    index.add(keys)
    true = (query.double() @ keys.double().mT).unflatten(-1, (-1, 16)).amax(-1)
    assert (index.score(query).double() >= true - 1e-5).all()
    # One token a page: the bound is its q.k, up to the rounding outwards.
    index = MinMax().build(PageShape(3, 4, 1, 64, 64))
    index.add(keys)
    true = query.double() @ keys.double().mT
    torch.testing.assert_close(index.score(query).double(), true, rtol=2e-3, atol=0.2)


def test_corners_of_float32_are_rounded_outwards() -> None:
    keys = torch.full((1, 1, 1, 8), 1.0 + 2.0**-12)
    index = MinMax().build(PageShape(1, 1, 1, 8, 8))
    index.add(keys)
    for sign in (1.0, -1.0):
        query = torch.full((1, 1, 1, 8), sign)
        assert index.score(query).item() >= (query @ keys.mT).item()


def test_grids_are_lloyd_max() -> None:
    """Each point is the mean of a standard normal variable within its cell."""
    for upper in GRIDS.values():
        grid = [*(-point for point in reversed(upper)), *upper]
        cuts = [-math.inf, *((a + b) / 2 for a, b in pairwise(grid)), math.inf]
        for point, low, high in zip(grid, *zip(*pairwise(cuts), strict=True), strict=True):
            density = [math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi) for cut in (low, high)]
            share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
            assert abs((density[0] - density[1]) / share - point) < 2e-3


@pytest.mark.parametrize("dim", [1, 8, 13, 64, 80, 96, 128, 192, 256])
def test_rotation_keeps_products(dim: int) -> None:
    turn = rotation(dim, CPU)
    assert turn.shape == (dim, padded(dim)) and padded(dim) & (padded(dim) - 1) == 0
    torch.testing.assert_close(turn @ turn.T, torch.eye(dim), rtol=0, atol=1e-5)
    # No channel of a single outlier is left alone: its energy is spread evenly.
    torch.testing.assert_close(turn.abs(), torch.full_like(turn, padded(dim) ** -0.5))


def test_the_rotation_never_changes() -> None:
    """Codes of a saved context are read with it."""
    signs = (rotation(16, CPU)[:, 0] > 0).int().tolist()
    assert signs == [1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_figures_that_cannot_be() -> None:
    shape = PageShape(1, 1, 16, 64, 64)
    for make in (lambda: RotatedKeys(3), lambda: MeanLandmark(0), lambda: MeanLandmark(5).build(shape)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.code == "SW-102"
