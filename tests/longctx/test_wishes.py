"""What generate is asked for is found wherever it is said, and does not change the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from stepwell.errors import Unsupported
from stepwell.longctx import attach
from stepwell.longctx.parts.select.topk import TopK
from tests.longctx.models import make, tokens
from tests.longctx.test_exact import SMALL
from tests.longctx.test_sparse import EVERYTHING, verified

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("policy", [SMALL, verified()])
def test_padding_that_nobody_named_is_seen_in_every_part_of_a_prompt(policy):
    model, ids = make(), tokens(200, rows=2)
    ids[0, :90] = model.generation_config.pad_token_id
    expected = model.generate(ids, **GREEDY)
    with attach(model, policy, hot_tokens=100, prefill_tokens=64) as attached:
        cache = attached.new_cache()
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert torch.equal(cache.mask[:, :200].bool(), ids.ne(0))
    # A token that ends texts, too, is no padding: transformers' rule.
    options = {**GREEDY, "eos_token_id": 0}
    expected = model.generate(ids, **options)
    with attach(model, policy, hot_tokens=100, prefill_tokens=64):
        assert torch.equal(model.generate(ids, **options), expected)


def test_arguments_by_position():
    model, ids = make(), tokens(120)
    config = GenerationConfig(**GREEDY)
    expected = model.generate(ids, config)
    with attach(model, SMALL, hot_tokens=64):
        assert torch.equal(model.generate(ids, config), expected)
        with pytest.raises(TypeError):
            model.generate(ids, *[None] * 12)


@pytest.mark.parametrize("wish", [{"use_cache": False}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 32}])
def test_what_cannot_be_is_refused_in_a_configuration_too(wish):
    model = make()
    with attach(model, SMALL, hot_tokens=64), pytest.raises(Unsupported) as refused:
        model.generate(tokens(120), generation_config=GenerationConfig(**GREEDY, **wish))
    assert refused.value.code == "SW-717"


def test_a_checkpoint_that_names_a_cache_is_no_wish():
    model, ids = make(), tokens(120)
    expected = model.generate(ids, **GREEDY)
    model.generation_config.cache_implementation = "hybrid"
    with attach(model, SMALL, hot_tokens=64):
        assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize(
    "wish", [{"guidance_scale": 2.0}, {"watermarking_config": {"greenlist_ratio": 0.5}}, {"inputs_embeds": True}]
)
def test_what_drafts_would_mislead_is_refused_by_verified(wish):
    model, ids = make(), tokens(120)
    inputs = {"input_ids": ids}
    if "inputs_embeds" in wish:
        inputs = wish = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    with attach(model, SMALL, hot_tokens=100):
        assert model.generate(**{**inputs, **GREEDY, **wish}).shape[1] >= 8  # an exact policy can
    with attach(model, verified(), hot_tokens=100), pytest.raises(Unsupported) as refused:
        model.generate(**{**inputs, **GREEDY, **wish})
    assert refused.value.code == "SW-717"


def test_every_policy_counts_what_it_generated():
    for policy in (SMALL, replace(EVERYTHING, selector=TopK(0.1)), verified()):
        model = make()
        with attach(model, policy, hot_tokens=100) as attached:
            model.generate(tokens(120), **GREEDY)
            assert attached.ledger.snapshot()["generated"] == 8


def test_a_verified_policy_is_exact_where_nobody_verifies():
    model, ids = make(), tokens(160)
    with torch.no_grad():
        expected = model(ids).logits[:, 140:]
        with attach(model, replace(verified(), selector=TopK(0.05)), hot_tokens=100) as attached:
            cache = attached.new_cache()
            model(ids[:, :140], past_key_values=cache)
            found = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(140, 160)]
            assert (torch.cat(found, 1) - expected).abs().max() < 1e-4 * expected.abs().max()
            with cache.drafting():
                assert (model(ids[:, :1], past_key_values=cache).logits is not None) and cache.ledger.steps > 0


def test_exactly_lasts_as_long_as_it_says():
    model, ids = make(), tokens(160)
    with attach(model, replace(EVERYTHING, selector=TopK(0.05)), hot_tokens=100, prefill_tokens=50) as attached:
        cache = attached.new_cache()
        with cache.exactly():
            model.generate(ids, past_key_values=cache, **GREEDY)
        assert cache.ledger.steps == 0  # none was sparse, also behind a prompt in parts
        model.generate(cache.tokens, past_key_values=None, **GREEDY)
        assert attached.ledger.steps > 0


class Heard:
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("policy", [SMALL, verified()])
def test_a_streamer_hears_every_token_once(policy):
    model, ids, heard = make(), tokens(120), Heard()
    with attach(model, policy, hot_tokens=100):
        found = model.generate(ids, streamer=heard, **GREEDY)
    assert heard.tokens == found[0].tolist() and heard.ends == 1
