"""The contract of key indexes as tests: subclass `IndexContract`, supply `kinds`, and pytest runs them over each."""

from __future__ import annotations

import pytest
import torch

from stepwell.longctx.parts.index.base import IndexKind, KeyIndex
from stepwell.longctx.shape import PageShape

LANES, HEADS, GROUP, PAGE = 2, 3, 2, 8


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Up to the order in which a product of another width sums."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


class IndexContract:
    """The first pages are always added in the same piece: an index may learn from them."""

    @pytest.fixture(params=[(16, torch.float32), (24, torch.bfloat16), (64, torch.float16)], ids=str)
    def case(self, request: pytest.FixtureRequest) -> tuple[PageShape, torch.Tensor, torch.Tensor]:
        """Shape, keys of 12 pages, and a query."""
        dim, dtype = request.param
        chance = torch.Generator().manual_seed(dim)
        keys = torch.randn(LANES, HEADS, 12 * PAGE, dim, generator=chance) + 2.0
        query = torch.randn(LANES, HEADS, GROUP, dim, generator=chance).to(dtype)
        return PageShape(HEADS, GROUP, PAGE, dim, dim), keys.to(dtype), query

    def filled(self, kind: IndexKind, shape: PageShape, *pieces: torch.Tensor) -> KeyIndex:
        index = kind.build(shape)
        for piece in pieces:
            index.add(piece)
        return index

    def test_shape_of_scores(self, kind, case) -> None:
        shape, keys, query = case
        index = self.filled(kind, shape, keys)
        scores = index.score(query)
        width = {"token": 12 * PAGE, "page": 12}[index.granularity]
        assert scores.shape == (LANES, HEADS, GROUP, width) and scores.dtype == torch.float32
        assert scores.isfinite().all()
        assert torch.equal(index.score(query), scores)

    def test_scores_tell_of_the_keys(self, kind, case) -> None:
        """A page (token) whose keys are turned towards the query comes first."""
        shape, keys, query = case
        keys = keys.clone()
        query = query[:, :, :1]
        aimed = torch.nn.functional.normalize(query.float(), dim=-1) * 4 * shape.key_dim**0.5
        keys[:, :, 5 * PAGE : 6 * PAGE] = aimed.to(keys.dtype)
        index = self.filled(kind, shape, keys)
        best = index.score(query).argmax(-1)
        page = best if index.granularity == "page" else best // PAGE
        assert (page == 5).all()

    def test_before_the_first_page(self, kind, case) -> None:
        shape, keys, query = case
        index = kind.build(shape)
        assert index.nbytes == 0 and index.score(query).shape == (LANES, HEADS, GROUP, 0)
        index.crop(0)
        index.rows(torch.tensor([1, 0]))
        index.add(keys)
        assert torch.equal(index.score(query), self.filled(kind, shape, keys).score(query))

    def test_pieces_are_the_whole(self, kind, case) -> None:
        shape, keys, query = case
        first, rest = keys[:, :, : 4 * PAGE], keys[:, :, 4 * PAGE :]
        whole = self.filled(kind, shape, first, rest)
        pieces = self.filled(kind, shape, first, *rest.split(PAGE, dim=2))
        assert torch.equal(pieces.score(query), whole.score(query))
        assert pieces.nbytes == whole.nbytes

    def test_crop_forgets(self, kind, case) -> None:
        shape, keys, query = case
        first, rest = keys[:, :, : 4 * PAGE], keys[:, :, 4 * PAGE :]
        index = self.filled(kind, shape, first, *rest.split(PAGE, dim=2))  # with room in reserve
        full, size = index.score(query), index.nbytes
        index.crop(12)
        index.crop(50)
        assert torch.equal(index.score(query), full)
        index.crop(6)
        width = full.shape[-1] // 2
        same(index.score(query), full[..., :width])
        assert index.nbytes < size
        index.add(-rest[:, :, 2 * PAGE :])
        assert not torch.equal(index.score(query), full)
        index.crop(6)
        index.add(rest[:, :, 2 * PAGE :])
        assert torch.equal(index.score(query), full) and index.nbytes == size
        index.crop(0)
        assert index.nbytes == 0 and index.score(query).shape[-1] == 0
        index.add(rest[:1])  # as if it were new
        assert torch.equal(index.score(query[:1]), self.filled(kind, shape, rest[:1]).score(query[:1]))

    def test_rows_are_gathered(self, kind, case) -> None:
        shape, keys, query = case
        first, rest = keys[:, :, : 4 * PAGE], keys[:, :, 4 * PAGE :]
        for lanes in (torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([0, 1, 1, 0])):
            index = self.filled(kind, shape, first)
            index.rows(lanes)
            gathered = self.filled(kind, shape, first[lanes])
            for one in (index, gathered):
                one.add(rest[lanes])
            assert torch.equal(index.score(query[lanes]), gathered.score(query[lanes]))
            assert index.nbytes == gathered.nbytes

    def test_lanes_do_not_meet(self, kind, case) -> None:
        shape, keys, query = case
        scores = self.filled(kind, shape, keys).score(query)
        for lane in range(LANES):
            alone = self.filled(kind, shape, keys[lane : lane + 1]).score(query[lane : lane + 1])
            same(alone, scores[lane : lane + 1])

    def test_keys_are_copied_and_carry_no_gradient(self, kind, case) -> None:
        shape, keys, query = case
        own = keys.clone().requires_grad_()
        index = self.filled(kind, shape, own[:, :, : 4 * PAGE], own[:, :, 4 * PAGE :])
        assert not index.score(query.clone().requires_grad_()).requires_grad
        first = keys[:, :, : 4 * PAGE].contiguous()
        index = self.filled(kind, shape, first)
        before = index.score(query)
        first.zero_()
        assert torch.equal(index.score(query), before)

    def test_inference_mode_may_come_and_go(self, kind, case) -> None:
        shape, keys, query = case
        with torch.inference_mode():
            index = self.filled(kind, shape, keys[:, :, : 8 * PAGE], keys[:, :, 8 * PAGE : 9 * PAGE])
            index.score(query)
        index.add(keys[:, :, 9 * PAGE :])
        expected = self.filled(kind, shape, *keys.split([8 * PAGE, PAGE, 3 * PAGE], dim=2))
        assert torch.equal(index.score(query), expected.score(query))

    def test_huge_keys_stay_finite(self, kind, case) -> None:
        shape, keys, query = case
        huge = (keys.float() * 20000).to(keys.dtype).nan_to_num()
        assert self.filled(kind, shape, huge, huge).score(query).isfinite().all()

    def test_equal_keys(self, kind, case) -> None:
        """Nothing is left of them once they are centred."""
        shape, keys, query = case
        for alike in (torch.zeros_like(keys), torch.full_like(keys, 1.5)):
            scores = self.filled(kind, shape, alike).score(query)
            exact = (query.float() * alike[0, 0, 0].float()).sum(-1, keepdim=True)
            assert scores.isfinite().all()
            error = (scores - exact).abs().amax()
            assert error <= 0.5 * query.float().norm(dim=-1).max() * alike[0, 0, 0].float().norm()
