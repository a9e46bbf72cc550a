"""What happened to a cache before (an interruption, a crop, its end) never shows in an answer without being told."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from stepwell.errors import ConfigError, Unsupported
from stepwell.longctx import TieredCache, attach, policies
from stepwell.longctx.kv import layer
from stepwell.longctx.model.cache import TieredLayer
from stepwell.longctx.parts.codec.quantised import Quantised
from tests.longctx.models import make, tokens
from tests.longctx.test_exact import SMALL, full
from tests.longctx.test_sparse import EVERYTHING, verified

GREEDY = {"max_new_tokens": 4, "do_sample": False}


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


@torch.no_grad()
def test_a_cache_outside_attach_is_refused_before_it_answers():
    model, ids = make(), tokens(120)
    with pytest.raises(Unsupported) as refused:
        model(ids, past_key_values=TieredCache(model.config, SMALL, hot_tokens=64))
    assert refused.value.code == "SW-715"
    with attach(model, SMALL, hot_tokens=64):  # and nothing of it is left
        assert torch.equal(model.generate(ids, **GREEDY)[:, :120], ids)


@torch.no_grad()
def test_an_interrupted_pass_ends_a_cache():
    model, ids = make(), tokens(170)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        model(ids[:, :150], past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(ids[:, 150:160], past_key_values=cache)
        hook.remove()
        for on in (
            lambda: model(ids[:, 150:], past_key_values=cache),
            lambda: model.generate(ids, past_key_values=cache, **GREEDY),
        ):
            with pytest.raises(ConfigError) as refused:
                on()
            assert refused.value.code == "SW-133"
        cache.reset()
        assert model.generate(ids, past_key_values=cache, **GREEDY).shape[1] == 174


@torch.no_grad()
def test_a_closed_cache_is_refused_and_does_not_wait_for_ever(tmp_path):
    model, ids = make(), tokens(150)
    with attach(model, SMALL, hot_tokens=64, host=None, disk=f"{tmp_path}:8MiB") as attached:
        cache = attached.new_cache()
        model(ids, past_key_values=cache)
        cache.close()
        with pytest.raises(ConfigError) as refused:
            model(ids, past_key_values=cache)
        assert refused.value.code == "SW-133"


def test_a_cropped_cache_knows_what_is_left_in_it():
    model, ids = make(), tokens(150)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        model.generate(ids, past_key_values=cache, **GREEDY)
        cache.crop(-30)
        assert torch.equal(cache.tokens, ids[:, : 153 - 30])
        other = ids.clone()
        other[:, :9] = 7
        with pytest.raises(ConfigError) as refused:
            model.generate(other, past_key_values=cache, **GREEDY)
        assert refused.value.code == "SW-132"
        assert model.generate(ids, past_key_values=cache, **GREEDY).shape[1] == 154
        cache.reset()
        assert cache.tokens is None


@torch.no_grad()
def test_windows_give_back_what_they_have_and_no_more():
    model, ids = make("gemma3"), tokens(150)
    expected = model(ids).logits
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        model(ids[:, :140], past_key_values=cache)
        for recording in (False, True):
            with pytest.raises(ConfigError) as refused:
                cache.crop(-60)
            assert refused.value.code == "SW-134" and {len(each.state) for each in cache.tiered} == {140}
            if not recording:
                cache.activate_past_recording()
        model(ids[:, 140:], past_key_values=cache)
        cache.crop(-10)
        found = model(ids[:, 140:], past_key_values=cache).logits
        assert (found - expected[:, 140:]).abs().max() < 1e-4 * expected.abs().max()


def test_passes_are_counted_where_the_first_layers_have_a_window():
    model = make("gemma3")
    with attach(model, SMALL, hot_tokens=64) as attached:
        model.generate(tokens(150), **GREEDY)
        assert attached.ledger.exact_passes == 3  # the prompt itself was hot


def test_a_cache_made_in_inference_mode_goes_on_outside():
    model, ids = make(), tokens(200)
    policy = replace(EVERYTHING, codec=Quantised(8, 8))
    with attach(model, policy, hot_tokens=120) as attached:
        cache = attached.new_cache()
        with torch.inference_mode():
            model(ids[:, :150], past_key_values=cache)
            model(ids[:, 150:151], past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([1]))
            cache.crop(-1)
            model(ids[:, 150:151], past_key_values=cache)
        with torch.no_grad():
            for at in range(151, 200):
                found = model(ids[:, at : at + 1], past_key_values=cache).logits
            expected = model(ids).logits[:, -1:]
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_autocast_is_no_further_off_than_it_is_without_tiers(kind):
    model, ids = make(kind), tokens(180)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        off = (model(ids).logits - exact).abs().mean()
        with attach(model, SMALL, hot_tokens=64) as attached:
            cache = attached.new_cache()
            found = [model(part, past_key_values=cache).logits for part in ids.split([100, 1, 1, 78], 1)]
    assert (torch.cat(found, 1) - exact).abs().mean() <= 1.5 * off


@pytest.mark.parametrize(("kind", "count"), [
    ("gemma3", 37), ("llama", 38),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("gemma3", 39), ("llama", 40)]),
])  # fmt: skip
def test_a_verified_turn_that_stopped_between_its_drafts_goes_on(kind, count):
    model, ids = make(kind), tokens(150)
    more = tokens(300, seed=2)
    first = model.generate(ids, max_new_tokens=count, do_sample=False)
    whole = torch.cat([first, more], 1)
    expected = model.generate(whole, max_new_tokens=20, do_sample=False)
    with attach(model, verified(), hot_tokens=100, prefill_tokens=64) as attached:
        cache = attached.new_cache()
        assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=count, do_sample=False), first)
        windows = [layer for layer in cache.layers if layer not in cache.tiered]
        assert all(layer.keys.shape[2] == 23 for layer in windows)
        attached.prefill(whole, cache)
        assert all(layer.keys.shape[2] == 23 for layer in windows)
        found = model.generate(whole, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_part_of_a_prompt_may_be_of_one_token(tmp_path, monkeypatch):
    """It ends no prefill: pages stay as full attention left them, and are read from where they lie."""
    monkeypatch.setattr(layer, "_READ_NUMBERS", 1 << 12)  # several pieces, so that some are read late
    model, ids = make(), tokens(203)
    expected = full(model, ids)
    places = {"host": None, "disk": f"{tmp_path}:64MiB"}
    with attach(model, "stepwell", hot_tokens=110, prefill_tokens=100, **places) as attached:
        cache = attached.new_cache()
        attached.prefill(ids, cache)
        assert cache.get_seq_length() == 201 and not cache.setting.approximate
        found = model(ids[:, 201:], past_key_values=cache).logits
        assert (found - expected[:, 201:]).abs().max() < 1e-4 * expected.abs().max()
        cache.close()


@torch.no_grad()
def test_a_cache_that_its_own_threads_find_unused_is_closed(tmp_path):
    model, ids = make(), tokens(170)
    with attach(model, SMALL, hot_tokens=64, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        model(ids, past_key_values=cache)
        fetcher, stores = cache.setting.fetcher, cache._stores
        cache.itself = cache
        del cache
        fetcher.start(gc.collect).result()
        for thread in [each for each in threading.enumerate() if each.name == "close-stepwell"]:
            thread.join()
        assert not stores._by_size and not fetcher._thread.is_alive()


@torch.no_grad()
@pytest.mark.parametrize("closed", [True, False])
def test_attention_with_another_cache_is_not_that_of_an_interrupted_one(closed, monkeypatch):
    model, ids, other = make(), tokens(150), tokens(60, seed=9)
    expected = full(model, other)
    with attach(model, SMALL, hot_tokens=64) as attached:
        cache = attached.new_cache()
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(TieredLayer, "update", lambda *args, update=TieredLayer.update: stop(update(*args)))
            model(ids, past_key_values=cache)  # ends between the update of layer 0 and its attention
        if closed:
            cache.close()
        else:
            with pytest.raises(Unsupported) as refused:
                model(other, past_key_values=DynamicCache())
            assert refused.value.code == "SW-715" and "interrupted" in refused.value.why
        found = model(other, past_key_values=DynamicCache()).logits
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("steps", [10, 12])
@pytest.mark.parametrize("how", ["reset", "crop"])
def test_windows_are_divided_by_what_is_there_now(steps, how):
    """What was watched before a cache was emptied is of other rows, and of pools that are gone."""
    model, policy = make(), replace(policies.named("kvdrive"), profile_steps=12, page_tokens=8, window=16)
    rows = 2 if how == "reset" else 1
    with attach(model, policy, hot_tokens=150) as attached:
        cache = attached.new_cache()
        for ids in (tokens(220), tokens(220, rows=rows)):
            model(ids[:, :200], past_key_values=cache)
            for token in ids[:, 200 : 200 + steps].split(1, 1):
                assert model(token, past_key_values=cache).logits.isfinite().all()
            if how == "reset":
                cache.reset()
            else:
                cache.crop(-cache.get_seq_length())
        cache.close()
