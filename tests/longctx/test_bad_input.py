"""What cannot be done correctly is refused, with the reason; what ends in the middle leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, StoppingCriteria, T5Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from lab.rig.well import until
from stepwell.errors import CapacityError, ConfigError, IntegrityError, StepwellError, Unsupported
from stepwell.longctx import AttentionMode, Policy, TieredCache, attach, policies
from stepwell.longctx.model import hook as handshake
from tests.longctx.models import CONFIGS, make, tokens
from tests.longctx.test_exact import SMALL, stepped
from tests.longctx.test_sparse import EVERYTHING, verified

OPTIONS = {"max_new_tokens": 60, "do_sample": False}


def changed(**settings):
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), **settings})
    for name, value in settings.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (changed(num_kv_shared_layers=2), "num_kv_shared_layers"),
        (changed(index_topk=64), "indexer"),
        (changed(kv_lora_rank=64), "latent"),
        (changed(alibi=True), "bias"),
        (changed(use_bidirectional_attention=True), "after"),
        (changed(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (changed(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=16), "chunked"),
        (changed(layer_types=["sliding_attention"] * 2, sliding_window=16), "window"),
        (T5Config(), "encoder"),
    ],
)
def test_models_that_cannot_be_tiered(config, why):
    with pytest.raises(Unsupported) as refused:
        TieredCache(config, SMALL, hot_tokens=64)
    assert refused.value.code == "SW-716" and why in str(refused.value)


def test_models_without_attention():
    with pytest.raises(StepwellError):
        TieredCache(MambaConfig(), SMALL, hot_tokens=64)


def test_a_model_that_nobody_tried_is_checked_first():
    model = make()
    model.config.model_type = "something-new"
    try:
        with attach(model, SMALL, hot_tokens=64):
            pass

        class Strange(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, *args, **kwargs):
                states, weights = self.inner(*args, **kwargs)
                return states * (1 + 0.01 * states.shape[1]), weights

        model.model.layers[1].self_attn = Strange(model.model.layers[1].self_attn)
        with pytest.raises(Unsupported) as refused, attach(model, SMALL, hot_tokens=64):
            pass
        assert refused.value.code == "SW-716" and "differ" in str(refused.value)
        assert model.config._attn_implementation != "stepwell" and "generate" not in model.__dict__
    finally:
        model.config.model_type = "llama"


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({"hot_tokens": 40}, "SW-130"),
        ({"policy": "kv-drive"}, "SW-131"),
        ({"host": "a lot"}, "SW-102"),
        ({"disk": "relative/path:1GiB"}, "SW-102"),
        ({"disk": "/proc/nowhere:1MiB"}, "SW-608"),
    ],
)
def test_impossible_wishes(wish, code):
    model = make()
    with pytest.raises(StepwellError) as refused, attach(model, **{"policy": SMALL, "hot_tokens": 64, **wish}):
        pass
    assert refused.value.code == code and model.config._attn_implementation != "stepwell"


@pytest.mark.parametrize(
    "wish",
    [{"mode": AttentionMode.SPARSE, "index": None}, {"page_tokens": 0}, {"draft_tokens": 0}, {"predicted_math": True}],
)
def test_impossible_policies(wish):
    with pytest.raises(ConfigError) as refused:
        replace(EVERYTHING, **wish)
    assert refused.value.code == "SW-129"
    with pytest.raises(ConfigError):
        Policy("lossy", AttentionMode.EXACT, codec=policies.named("yakv").codec)


@pytest.mark.parametrize(
    ("policy", "wish"),
    [
        (SMALL, {"use_cache": False}),
        (SMALL, {"cache_implementation": "static"}),
        (SMALL, {"prompt_lookup_num_tokens": 3}),
        (verified(), {"do_sample": True}),
        (verified(), {"num_beams": 2}),
        (verified(), {"return_dict_in_generate": True}),
    ],
)
def test_options_of_generate_that_cannot_be(policy, wish):
    model = make()
    with attach(model, policy, hot_tokens=100), pytest.raises(Unsupported) as refused:
        model.generate(tokens(120), **{**OPTIONS, **wish})
    assert refused.value.code == "SW-717"


def test_masks_with_four_axes_are_refused():
    model, ids = make(), tokens(20)
    with attach(model, SMALL, hot_tokens=64) as attached, torch.no_grad(), pytest.raises(Unsupported) as refused:
        model(ids, attention_mask=torch.ones(1, 1, 20, 20).tril(), past_key_values=attached.new_cache())
    assert refused.value.code == "SW-715"


def test_a_layer_that_is_not_the_one_that_was_updated():
    model, ids = make(layers=4), tokens(20)
    with attach(model, SMALL, hot_tokens=64) as attached:
        model.model.layers[2].self_attn.layer_idx = 1
        model.model.layers[1].self_attn.layer_idx = 2
        cache = attached.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)  # consistent: another order is no error
        update = cache.layers[0].update

        def twice(*args, **kwargs):
            found = update(*args, **kwargs)
            handshake.leave(cache.layers[3].state, torch.empty(0))
            return found

        cache.layers[0].update = twice
        with torch.no_grad(), pytest.raises(Unsupported) as refused:
            model(ids[:, :1], past_key_values=cache)
        assert refused.value.code == "SW-715"


def inside():
    return set(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("policy", [SMALL, EVERYTHING, verified()])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_full_tiers_end_a_generation_with_the_text_so_far(policy, where, tmp_path):
    model, ids = make(), tokens(150)
    expected = model.generate(ids, **{**OPTIONS, "max_new_tokens": 90})
    page = 2 * 2 * 8 * 16 * 4  # K and V, KV heads, tokens, head size, float32
    room = 2 * 12 * page
    sizes = {"host": room} if where == "host" else {"host": None, "disk": f"{tmp_path}:{room}"}
    before = inside()
    with attach(model, policy, hot_tokens=100, prefill_tokens=64, **sizes) as attached:
        with pytest.raises(CapacityError) as full:
            model.generate(ids, **{**OPTIONS, "max_new_tokens": 90})
        assert full.value.code == "SW-209"
        so_far = full.value.tokens
        assert so_far.shape[1] >= 150 and torch.equal(so_far, expected[:, : so_far.shape[1]])
        assert attached.ledger.bytes
    gc.collect()
    assert inside()[0] <= before[0] and inside()[1] <= before[1] and not os.listdir(tmp_path)


class _Cancelled(Exception):
    pass


class _Cancel(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= 170:
            raise _Cancelled
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("policy", [SMALL, replace(EVERYTHING, prefetch=True), verified()])
def test_a_cancelled_generation_leaves_nothing(policy, tmp_path):
    model, ids = make(), tokens(150)
    before = inside()
    with attach(model, policy, hot_tokens=100, host=None, disk=f"{tmp_path}:64MiB"):
        with pytest.raises(_Cancelled):
            model.generate(ids, stopping_criteria=[_Cancel()], **OPTIONS)
        expected = model.generate(ids, **OPTIONS)  # and the next one is as if nothing had happened
    gc.collect()
    assert inside()[0] <= before[0] and inside()[1] <= before[1] and not os.listdir(tmp_path)
    if policy.mode is not AttentionMode.SPARSE:
        assert torch.equal(model.generate(ids, **OPTIONS), expected)


def test_a_page_that_did_not_come_back_as_it_was_ends_the_generation(tmp_path):
    model, ids = make(), tokens(300)
    with attach(model, SMALL, hot_tokens=64, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        stepped(model, ids[:, :250], cache, [250])
        files = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        unnamed = [path for path in files if os.path.exists(path) and str(tmp_path) in os.readlink(path)]
        file = os.open(unnamed[0], os.O_RDWR)

        def damaged_for_good() -> bool:
            """Pages are written beside the model's steps, in any order: what comes late writes over the damage."""
            if not any(os.pread(file, 512, 5000)):
                return False
            wrong = bytes([os.pread(file, 1, 5000)[0] ^ 1])
            os.pwrite(file, wrong, 5000)
            time.sleep(0.2)
            return os.pread(file, 1, 5000) == wrong

        assert until(damaged_for_good, 20)
        os.close(file)
        with pytest.raises(IntegrityError) as damaged:
            stepped(model, ids, cache, [1])
        assert damaged.value.code == "SW-305"
        cache.close()


def test_the_model_trains_as_before_outside():
    model = LlamaForCausalLM(copy.deepcopy(CONFIGS["llama"]))
    model(tokens(20), labels=tokens(20)).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.parametrize("size", [0, -5])
def test_parts_of_a_prompt_have_a_size(size):
    with pytest.raises(ConfigError, match="SW-130"), attach(make(), "exact", prefill_tokens=size):
        pass
