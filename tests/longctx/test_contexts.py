"""Contexts that were saved go on as if nothing had happened, and only with the model that made them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stepwell.errors import AccessDenied, CapacityError, ConfigError, IdentityMismatch, IntegrityError
from stepwell.longctx import AttentionMode, attach
from stepwell.longctx.parts.codec.quantised import Quantised
from tests.longctx.models import make, tokens
from tests.longctx.test_exact import SMALL
from tests.longctx.test_sparse import EVERYTHING

KEY = bytes(range(32))
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", [SMALL, EVERYTHING, replace(EVERYTHING, joint=False, page_tokens=1)])
def test_a_saved_context_goes_on(kind, policy, tmp_path):
    model, ids = make(kind), tokens(240, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    with attach(model, policy, hot_tokens=120, prefill_tokens=64) as attached:
        cache = attached.new_cache()
        attached.prefill(ids[:, :200], cache, mask[:, :200])
        attached.save(tmp_path / "context", cache, key=KEY)
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **OPTIONS), expected)
        cache.close()
    with attach(make(kind), SMALL, hot_tokens=90) as other:
        cache = other.open(tmp_path / "context", key=KEY)
        assert torch.equal(cache.tokens, ids[:, : cache.get_seq_length()]) and cache.get_seq_length() == 198
        assert cache.mask is not None
    with attach(model, SMALL, hot_tokens=90) as other:
        cache = other.open(tmp_path / "context", key=KEY)
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **OPTIONS), expected)
        cache.close()


def saved(tmp_path, model, attached):
    cache = attached.new_cache()
    attached.prefill(tokens(200), cache)
    attached.save(tmp_path / "context", cache, key=KEY)
    cache.close()
    return tmp_path / "context"


def test_another_model_key_or_file_is_refused(tmp_path):
    model = make()
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=64) as attached:
        path = saved(tmp_path, model, attached)
        with pytest.raises(AccessDenied) as denied:
            attached.open(path, key=bytes(32))
        assert denied.value.code == "SW-610"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(IntegrityError) as damaged:
            attached.open(path, key=KEY)
        assert damaged.value.code == "SW-306"
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-4096])
        with pytest.raises(IntegrityError):
            attached.open(path, key=KEY)
        path.write_bytes(content)
        attached.open(path, key=KEY).close()
    with attach(make(seed=1), SMALL, hot_tokens=64) as other, pytest.raises(IdentityMismatch) as mismatch:
        other.open(path, key=KEY)
    assert mismatch.value.code == "SW-407"


def test_tiers_that_do_not_hold_it_say_so(tmp_path):
    model = make()
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=64) as attached:
        path = saved(tmp_path, model, attached)
    with attach(model, SMALL, hot_tokens=64, host="16KiB") as small, pytest.raises(CapacityError) as full:
        small.open(path, key=KEY)
    assert full.value.code == "SW-209"


def test_a_prompt_of_another_text_is_refused():
    model, ids = make(), tokens(200)
    with attach(model, SMALL, hot_tokens=64, prefill_tokens=64) as attached:
        cache = attached.new_cache()
        one = model.generate(ids, past_key_values=cache, **OPTIONS)
        for wrong in (tokens(300, seed=9), one[:, :100], one[:, : cache.get_seq_length()]):
            with pytest.raises(ConfigError) as refused:
                model.generate(wrong, past_key_values=cache, **OPTIONS)
            assert refused.value.code == "SW-132"
        assert model.generate(one, past_key_values=cache, **OPTIONS).shape[1] == 240
        cache.close()


def test_what_sparse_steps_left_is_not_taken_for_exact(tmp_path):
    model, ids = make(), tokens(200)
    for policy in (EVERYTHING, replace(EVERYTHING, codec=Quantised(8, 4))):
        with attach(model, policy, hot_tokens=120) as attached:
            cache = attached.new_cache()
            with cache.exactly():
                model.generate(ids, past_key_values=cache, **OPTIONS)
            assert not cache.setting.approximate  # exact steps leave nothing, in whatever policy
            cache.reset()
            model.generate(ids, past_key_values=cache, **OPTIONS)
            attached.save(tmp_path / "context", cache, key=KEY)
            again = attached.open(tmp_path / "context", key=KEY)
            attached.save(tmp_path / "context", again, key=KEY)  # nor after another time
        for exact in (SMALL, replace(policy, mode=AttentionMode.VERIFIED)):
            with attach(model, exact, hot_tokens=120) as attached, pytest.raises(ConfigError) as refused:
                attached.open(tmp_path / "context", key=KEY)
            assert refused.value.code == "SW-135"
    with attach(
        model, replace(policy, mode=AttentionMode.VERIFIED), hot_tokens=120
    ) as attached:  # whose drafts leave nothing
        cache = attached.new_cache()
        model.generate(ids, past_key_values=cache, **OPTIONS)
        attached.save(tmp_path / "context", cache, key=KEY)
    with attach(model, SMALL, hot_tokens=120) as attached:
        assert attached.open(tmp_path / "context", key=KEY).get_seq_length() == 219
