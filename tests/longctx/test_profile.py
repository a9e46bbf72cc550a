"""Slots go to the layers that gain from them."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepwell.longctx import attach, policies
from stepwell.longctx.kv.pool import PagePool
from stepwell.longctx.kv.profile import Profile
from stepwell.longctx.shape import PageShape
from tests.longctx.models import make, tokens
from tests.longctx.test_exact import stepped


def test_layers_that_select_the_same_again_need_fewer_slots():
    profile, made = Profile(24), torch.Generator().manual_seed(0)
    steady = torch.zeros(1, 200, dtype=torch.bool)
    steady[:, :10] = True
    assert not profile.ready
    for step in range(24):
        profile.note(0, steady)
        drifting = torch.zeros(1, 200, dtype=torch.bool)
        drifting[:, 4 * step : 4 * step + 20] = True
        profile.note(1, drifting)
        profile.note(2, torch.rand(1, 200, generator=made) < 0.01)
    assert profile.ready
    found = profile.divide({0: 20, 1: 20, 2: 20})
    assert sum(found.values()) <= 60 and found[1] > found[0] >= 10 and found[1] >= found[2]


def test_a_pool_that_is_resized_keeps_what_fits():
    shape = PageShape(heads=1, group=1, tokens=2, key_dim=4, value_dim=4)
    pool = PagePool(shape, 1, 3, torch.float32, torch.device("cpu"))
    keep = torch.tensor([[True, False, True, True]])
    change = pool.exchange(keep)
    contents = torch.arange(3 * 8, dtype=torch.float32).view(3, 1, 2, 4)
    pool.install(change, contents, -contents)
    pool.resize(5)
    assert pool.resident(4).tolist() == keep.tolist() and pool.keys.shape == (1, 1, 10, 4)
    assert torch.equal(pool.keys[0, 0, :6].flatten(), contents.flatten())
    pool.resize(1)
    assert pool.resident(4).sum() == 1 and torch.equal(pool.values[0, 0].flatten(), -contents[0].flatten())
    pool.resize(0)
    assert pool.resident(4).sum() == 0


def test_the_budget_stays_what_it_was():
    model, ids = make(), tokens(700)
    policy = replace(policies.named("kvdrive"), profile_steps=12)
    with attach(model, policy, hot_tokens=300) as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, [640, *[1] * 12])
        before = [layer.state.pool.slots for layer in cache.tiered]
        stepped(model, ids, cache, [1] * 30)
        after = [layer.state.pool.slots for layer in cache.tiered]
        assert cache.setting.profile is None and sum(after) <= sum(before) and len(set(before)) == 1
        cache.close()
