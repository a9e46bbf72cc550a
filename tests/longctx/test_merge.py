"""Parts, merged in any partition and order, are attention over the whole."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.longctx.attention.merge import PartialAttention, attend, finish, merge, sink


def whole(query, keys, values, scale, valid=None, softcap=None, sinks=None):
    """Plain softmax attention in float64."""
    logits = torch.einsum("lhgqd,lhnd->lhgqn", query.double() * scale, keys.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if valid is not None:
        logits = logits.masked_fill(~valid, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[None, :, :, None, None].expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : keys.shape[2]]
    return torch.einsum("lhgqn,lhnd->lhgqd", weights, values.double())


def states(seed, lanes, heads, group, steps, count, dim, value_dim, size=1.0, dtype=torch.float32):
    made = torch.Generator().manual_seed(seed)
    query = torch.randn(lanes, heads, group, steps, dim, generator=made) * size
    keys = torch.randn(lanes, heads, count, dim, generator=made) * size
    values = torch.randn(lanes, heads, count, value_dim, generator=made)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


@given(st.data())
def test_any_partition_in_any_order_is_the_whole(data):
    dim = data.draw(st.sampled_from([64, 80, 96, 128, 192, 256]))
    value_dim = data.draw(st.sampled_from([dim, 64, 128]))
    shape = [data.draw(st.integers(1, most)) for most in (2, 3, 4, 3)]
    count = data.draw(st.integers(1, 60))
    softcap = data.draw(st.sampled_from([None, 5.0, 50.0]))
    size = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    query, keys, values = states(data.draw(st.integers(0, 99)), *shape, count, dim, value_dim, size)
    valid = torch.rand(shape[0], 1, 1, shape[3], count, generator=torch.Generator().manual_seed(count)) < data.draw(
        st.sampled_from([0.1, 0.7, 1.0])
    )
    members = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    order = data.draw(st.permutations(range(6)))  # part 5 is always empty
    kept = {"scale": dim**-0.5, "softcap": softcap}
    parts = [
        attend(
            query, keys[:, :, members == part], values[:, :, members == part], valid=valid[..., members == part], **kept
        )
        for part in order
    ]
    expected = whole(query, keys, values, dim**-0.5, valid, softcap)
    assert (finish(reduce(merge, parts)).double() - expected).abs().max() < 2e-5 * max(size, 10.0)
    nested = merge(reduce(merge, parts[:2]), merge(reduce(merge, parts[4:]), reduce(merge, parts[2:4])))
    assert (finish(nested).double() - expected).abs().max() < 2e-5 * max(size, 10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    query, keys, values = states(1, 1, 2, 3, 1, 40, 64, 64, dtype=dtype)
    expected = whole(query, keys, values, 0.125)
    parts = [attend(query, keys[:, :, some], values[:, :, some], scale=0.125) for some in (slice(0, 7), slice(7, 40))]
    assert (finish(reduce(merge, parts)).double() - expected).abs().max() < 1e-5


def test_one_part_may_be_greater_by_far():
    query, keys, values = states(2, 1, 1, 1, 1, 20, 64, 64)
    keys[:, :, 3] = query[:, :, 0, 0] * 1e4
    expected = whole(query, keys, values, 1.0)
    parts = [attend(query, keys[:, :, n : n + 1], values[:, :, n : n + 1], scale=1.0) for n in range(20)]
    for found in (reduce(merge, parts), reduce(merge, parts[::-1])):
        assert torch.isfinite(finish(found)).all()
        assert (finish(found).double() - expected).abs().max() < 1e-5


def test_nothing_to_see_is_zero_and_changes_nothing():
    query, keys, values = states(3, 1, 2, 2, 2, 8, 64, 80)
    nothing = attend(query, keys, values, scale=1.0, valid=torch.zeros(1, 1, 1, 1, 8, dtype=torch.bool))
    assert (nothing.peak == -torch.inf).all() and (nothing.total == 0).all() and (finish(nothing) == 0).all()
    assert (finish(merge(nothing, nothing)) == 0).all()
    some = attend(query, keys, values, scale=1.0)
    assert torch.equal(finish(merge(nothing, some)), finish(some)) and torch.equal(merge(some, nothing).lse, some.lse)
    empty = attend(query, keys[:, :, :0], values[:, :, :0], scale=1.0)
    assert torch.equal(finish(merge(empty, some)), finish(some))


def test_learned_sinks_take_mass_and_give_nothing():
    query, keys, values = states(4, 1, 2, 3, 1, 12, 64, 64)
    logits = torch.randn(2, 3)
    part = attend(query, keys, values, scale=0.125)
    found = finish(merge(part, sink(logits[None, :, :, None], part)))
    assert (found.double() - whole(query, keys, values, 0.125, sinks=logits)).abs().max() < 1e-5


def test_tiles_of_keys_are_merged_too(monkeypatch):
    query, keys, values = states(6, 1, 2, 3, 2, 200, 64, 64)
    at_once = finish(attend(query, keys, values, scale=0.1))
    monkeypatch.setattr("stepwell.longctx.attention.merge._TILE_NUMBERS", 12 * 64)
    valid = torch.ones(1, 1, 1, 2, 200, dtype=torch.bool)
    assert (finish(attend(query, keys, values, scale=0.1, valid=valid)) - at_once).abs().max() < 1e-5


def test_parts_tell_their_log_sum_exp():
    query, keys, values = states(7, 1, 1, 1, 1, 9, 64, 64)
    part: PartialAttention = attend(query, keys, values, scale=0.2)
    logits = torch.einsum("lhgqd,lhnd->lhgqn", query, keys) * 0.2
    assert torch.allclose(part.lse, logits.logsumexp(-1))
