"""EXACT equals full attention, whatever is where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from stepwell.longctx import AttentionMode, Policy, TieredCache, attach
from stepwell.longctx.parts.codec.plain import Half
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.parts.select.topk import TopK
from tests.longctx.models import CONFIGS, make, tokens

SMALL = Policy("exact-small", AttentionMode.EXACT, page_tokens=8, sinks=4, window=16, draft_tokens=4)


def full(model, ids, mask=None):
    """Logits of transformers' own attention, in one pass."""
    options = {}
    if mask is not None:
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    with torch.no_grad():
        return model(ids, **options).logits


def stepped(model, ids, cache, parts, mask=None):
    """Logits of passes over parts of so many tokens, one after the other, with `cache`."""
    found, start = [], cache.get_seq_length()
    for count in parts:
        options = {}
        if mask is not None:
            seen = mask[:, : start + count]
            options = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp_min(0)[:, start:]}
        with torch.no_grad():
            found.append(model(ids[:, start : start + count], past_key_values=cache, **options).logits)
        start += count
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("where", ["host", "disk"])
def test_logits_are_those_of_full_attention(kind, where, tmp_path):
    model, ids = make(kind), tokens(260)
    expected = full(model, ids)
    sizes = {"host": "64MiB"} if where == "host" else {"host": None, "disk": [f"{tmp_path}:64MiB"]}
    with attach(model, SMALL, hot_tokens=64, **sizes) as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [100, 70, *[1] * 10, 60, *[1] * 20])
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        cache.measure()
        assert cache.ledger.sizes[where] > 0 and cache.ledger.snapshot()["bytes_cold_to_hot"] > 0
        layer = cache.tiered[0].state
        assert layer.pages * 8 > 0.7 * 260 and len(layer) == 260
        cache.close()
    assert torch.equal(full(model, ids), expected)  # the model is as it was


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_left_padded_rows_are_those_of_full_attention(kind):
    model, ids = make(kind), tokens(160, rows=3)
    mask = torch.ones(3, 160, dtype=torch.long)
    mask[1, :37] = mask[2, :90] = 0
    expected = full(model, ids, mask)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [50, 45, *[1] * 5, 30, *[1] * 30], mask)
        real = mask.bool()
        assert (found - expected)[real].abs().max() < 1e-4 * expected.abs().max()
        cache.close()


def test_padding_matters_to_this_test():
    model, ids = make(), tokens(160, rows=2)
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[1, :90] = 0
    assert (full(model, ids, mask) - full(model, ids))[1, 90:].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_off_than_sdpa(dtype):
    ids = tokens(200)
    reference = full(make(), ids).log_softmax(-1)
    model = make(dtype=dtype)

    def kl(logits):
        return (reference.exp() * (reference - logits.float().log_softmax(-1))).sum(-1).mean()

    plain = kl(full(model, ids))
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        assert kl(stepped(model, ids, cache, [100, *[1] * 100])) <= 1.5 * plain
        cache.close()


def test_generate_gives_the_same_tokens_and_leaves_the_model_alone():
    model, ids = make(), tokens(180)
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **options)
    before = model.config._attn_implementation
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=50):
        assert torch.equal(model.generate(ids, **options), expected)
        assert model.config._attn_implementation == "stepwell"
    assert model.config._attn_implementation == before and "generate" not in model.__dict__
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("prefill", [50, 1000])
def test_beams_share_their_past_and_part_from_it(prefill):
    model, ids = make(), tokens(150)
    options = {"max_new_tokens": 24, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(ids, **options)
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=prefill):
        assert torch.equal(model.generate(ids, **options), expected)


def test_turns_on_one_cache():
    model, first, second = make(), tokens(150), tokens(60, seed=1)
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = DynamicCache(config=model.config)
    one = model.generate(first, past_key_values=plain, **options)
    two = model.generate(torch.cat([one, second], 1), past_key_values=plain, **options)
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=40) as attached:
        cache = attached.new_cache()
        assert torch.equal(model.generate(first, past_key_values=cache, **options), one)
        assert torch.equal(model.generate(torch.cat([one, second], 1), past_key_values=cache, **options), two)
        cache.close()


@pytest.mark.parametrize("back", [1, 17, 63, 120, 199, 200])
def test_crop_takes_tokens_back_out_of_every_tier(back):
    model, ids, other = make(), tokens(200), tokens(80, seed=5)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, [120, *[1] * 30, 50])
        cache.crop(-back)
        left = 200 - back
        assert cache.get_seq_length() == left
        mixed = torch.cat([ids[:, :left], other], 1)
        found = stepped(model, mixed, cache, [30, *[1] * 50])
        assert (found - full_plain(model, mixed)[:, left:]).abs().max() < 1e-2
        cache.close()


def full_plain(model, ids):
    """While attached: without a cache the function is SDPA."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_rows_are_selected_and_repeated():
    model, ids = make(), tokens(150, rows=3)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, [150])
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        rows = torch.tensor([0, 2, 2, 0])
        more = torch.cat([ids[rows], tokens(40, rows=4, seed=7)], 1)
        found = stepped(model, more, cache, [20, *[1] * 20])
        expected = full_plain(model, more)[:, 150:]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        cache.close()


def test_per_head_lanes_and_pages_of_one_token():
    model, ids = make(), tokens(200, rows=2)
    expected = full(model, ids)
    policy = replace(SMALL, joint=False, page_tokens=1)
    with attach(model, policy, hot_tokens=64) as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [90, *[1] * 110])
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        cache.close()


def test_short_contexts_stay_hot():
    model, ids = make(), tokens(60)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [30, *[1] * 30])
        assert (found - full_plain(model, ids)).abs().max() < 1e-3
        assert not cache.ledger.bytes and cache.tiered[0].state.pages == 0
        cache.close()


def test_nothing_is_left_when_a_cache_is_forgotten(tmp_path):
    import gc
    import os
    import threading

    model, ids = make(), tokens(200)
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with attach(model, SMALL, hot_tokens=64, host=None, disk=[f"{tmp_path}:64MiB"]) as attached:
        stepped(model, ids, attached.new_cache(), [200])
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= descriptors and not os.listdir(tmp_path)
    assert threading.active_count() <= threads


def test_a_cache_of_its_own_works_where_the_implementation_is_set():
    model, ids = make(), tokens(120)
    expected = full(model, ids)
    cache = TieredCache(model.config, SMALL, hot_tokens=64)
    model.set_attn_implementation("stepwell")
    found = stepped(model, ids, cache, [100, *[1] * 20])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    cache.close()


@pytest.mark.parametrize("codec", [None, Half()])
def test_steps_of_a_verified_policy_in_a_loop_of_ones_own_are_exact(codec, tmp_path):
    """Also the first one, whose pages were asked for before anything was known of decoding."""
    policy = replace(
        SMALL, mode=AttentionMode.VERIFIED, index=MinMax(), selector=TopK(0.2), residency=StepWindow(3), codec=codec
    )
    model, ids = make(), tokens(250)
    expected = full(model, ids)
    with attach(model, policy, hot_tokens=120, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [150, 90, *[1] * 10])
        assert cache.tiered[0].state.pool is not None
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
        cache.close()
