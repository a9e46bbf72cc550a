"""Sparse steps: equal to full attention where a policy selects everything, and what they say of what they leave out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from stepwell.longctx import AttentionMode, Policy, attach, policies
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.residency.lru import LruPages
from stepwell.longctx.parts.select.controls import Recent
from stepwell.longctx.parts.select.topk import TopK
from tests.longctx.models import make, tokens
from tests.longctx.test_exact import full, stepped
from tests.longctx.tiny_text import tiny_tokenizer

EVERYTHING = Policy(
    "everything", index=MinMax(), selector=TopK(1.0), residency=LruPages(), page_tokens=8, window=16, draft_tokens=4
)
STEPS = 24
PARTS = [150, *[1] * STEPS]


@pytest.mark.parametrize("rows, change", [
    *[(1, change) for change in [
        {}, {"joint": False}, {"page_tokens": 1, "joint": False}, {"residency": None}, {"executor": "in_place"},
        {"query": "previous"}, {"prefetch": True}, {"query": "ahead", "prefetch": True}, {"attend_hot": False},
        {"prefetch": True, "disk": True}, {"query": "ahead", "prefetch": True, "disk": True, "joint": False},
        {"prefetch": True, "disk": True, "lookahead": 2},
    ]],
    *[(2, change) for change in [
        {}, {"page_tokens": 1, "joint": False}, {"executor": "in_place"}, {"query": "previous"},
        {"query": "ahead", "prefetch": True, "disk": True, "joint": False},
    ]],
])  # fmt: skip
def test_selecting_everything_is_exact(rows, change, tmp_path):
    change = dict(change)
    places = {"host": None, "disk": f"{tmp_path}:64MiB"} if change.pop("disk", False) else {}
    model, ids = make(layers=change.get("lookahead", 1) * 2), tokens(150 + STEPS, rows=rows)
    mask = None
    if rows == 2:
        mask = torch.ones(2, 150 + STEPS, dtype=torch.long)
        mask[1, :61] = 0
    expected = full(model, ids, mask)
    with attach(model, replace(EVERYTHING, **change), hot_tokens=120, **places) as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, PARTS, mask)
        off = (found - expected).abs()
        assert (off if mask is None else off[mask.bool()]).max() < 1e-4 * expected.abs().max()
        told = cache.ledger.snapshot()
        assert told["uncovered_mass_max"] < 1e-5 and told["layer_steps"] == model.config.num_hidden_layers * STEPS
        cache.close()


@pytest.mark.parametrize("joint", [True, False])
def test_early_fetches_are_hints(joint, tmp_path):
    """They bring what is needed, are counted, and where only what was selected is attended over, change nothing."""
    model, ids = make(layers=4), tokens(250)
    policy = replace(EVERYTHING, prefetch=True, residency=None, selector=TopK(0.2), index=TrueKeys(), joint=joint)
    places = {"host": None, "disk": f"{tmp_path}:64MiB"}
    found = {}
    for prefetch in (True, False):
        chosen = replace(policy, prefetch=prefetch, attend_hot=False)
        with attach(model, chosen, hot_tokens=80, **places) as attached:
            cache = attached.new_cache()
            found[prefetch] = stepped(model, ids, cache, PARTS)
            pages = cache.ledger.pages
            assert (pages["early"] > 0) == prefetch and pages["early"] + pages["mispredicted"] <= pages["fetched"]
            cache.close()
    assert (found[True] - found[False]).abs().max() < 1e-4 * found[True].abs().max()


def test_no_more_new_pages_than_a_policy_allows(tmp_path):
    model, ids = make(), tokens(250)
    policy = replace(EVERYTHING, prefetch=True, residency=None, selector=TopK(0.3), new_pages=3)
    with attach(model, policy, hot_tokens=80, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, PARTS)
        assert 0 < cache.ledger.pages["fetched"] <= 3 * cache.ledger.steps
        cache.close()


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("late", [1.0, 0.06])
def test_what_was_not_foretold_comes_for_the_next_step(lookahead, late, tmp_path):
    model, ids = make(layers=4), tokens(250)
    policy = replace(
        EVERYTHING, selector=TopK(0.3), index=TrueKeys(), prefetch=True, lookahead=lookahead, late_mass=late
    )
    with attach(model, policy, hot_tokens=140, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        found = stepped(model, ids, cache, [150, *[1] * 60])
        pages = cache.ledger.pages
        waited = pages["selected"] - pages["hits"] - pages["early"] - pages["late"]
        assert (waited == 0) == (late == 1.0) and pages["early"] > 0 and found.isfinite().all()
        coming = sum(brought.count for layer in cache.tiered for brought in layer.state.ahead.fetches)
        came = pages["fetched"] - pages["mispredicted"] - coming
        assert pages["late"] > 0 and pages["selected"] == pages["hits"] + came + pages["late"]
        cache.close()


def test_beams_attend_over_what_was_not_foretold(tmp_path):
    """Their rows change in each step: what comes for the next one would be of rows that are not there any more."""
    model, ids = make(layers=4), tokens(250)
    policy = replace(EVERYTHING, prefetch=True, late_mass=1.0)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3, "length_penalty": 0.0}
    expected = model.generate(ids, **options)
    with attach(model, policy, hot_tokens=80, host=None, disk=f"{tmp_path}:64MiB") as attached:
        assert torch.equal(model.generate(ids, **options), expected)
        pages = attached.ledger.pages
        assert pages["early"] > 0 and pages["selected"] == pages["hits"] + pages["fetched"] - pages["mispredicted"]


def test_nothing_is_fetched_early_where_reading_is_not_beside():
    model, ids = make(), tokens(200)
    with attach(model, replace(EVERYTHING, prefetch=True, residency=None), hot_tokens=80) as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, [150, *[1] * 20])
        assert not cache.ledger.pages["early"]
        cache.close()


@pytest.mark.parametrize("name", [name for name in policies.names if name != "exact"])
def test_named_policies_run_and_stay_within_their_budget(name):
    model, ids = make(), tokens(700)
    with attach(model, name, hot_tokens=400) as attached:
        cache = attached.new_cache()
        with cache.drafting():  # of a policy that verifies, what it drafts
            stepped(model, ids, cache, [640, *[1] * 30])
        cache.measure()
        told = cache.ledger.snapshot()
        pool = sum(layer.state.pool.nbytes for layer in cache.tiered if layer.state.pool is not None)
        tails = sum(layer.state.tail.nbytes for layer in cache.tiered)
        per_token = 2 * 16 * 4 * 2 * 2  # K and V, head size, float32, KV heads, layers
        assert pool + tails <= (400 + 4 * 70) * per_token
        assert told["bytes_cold_to_hot"] > 0 and told["layer_steps"] == 2 * 30 and 0 <= told["uncovered_mass"] <= 1
        pages = cache.ledger.pages
        assert pages["selected"] == pages["hits"] + pages["fetched"] - pages["mispredicted"] + pages["in_place"] > 0
        cache.close()


def test_what_was_left_out_is_estimated_as_it_is():
    model, ids = make(), tokens(300)
    with attach(model, replace(EVERYTHING, index=TrueKeys(), selector=TopK(0.1), residency=None), hot_tokens=80) as a:
        cache = a.new_cache()
        cache.setting.audit = True
        stepped(model, ids, cache, PARTS + [1] * 30)
        told = cache.ledger.snapshot()
        assert (
            told["true_uncovered_mass"] == pytest.approx(told["uncovered_mass"], rel=1e-3)
            and told["uncovered_mass"] > 0
        )
        cache.close()


def test_the_alarm_is_raised_when_a_policy_leaves_much_out():
    model, ids = make(), tokens(300)
    with attach(
        model, replace(EVERYTHING, index=TrueKeys(), selector=Recent(0.01), residency=None), hot_tokens=80
    ) as a:
        cache = a.new_cache()
        stepped(model, ids, cache, PARTS)
        assert cache.ledger.alarms > 0
        cache.close()


def verified(**change):
    return replace(EVERYTHING, mode=AttentionMode.VERIFIED, selector=TopK(0.1), index=TrueKeys(), **change)


@pytest.mark.parametrize("change, rows", [
    ({}, 1), ({}, 2), ({"page_tokens": 1, "joint": False}, 2), ({"selector": Recent(0.02)}, 1), ({"lossy": True}, 2),
])  # fmt: skip
def test_verified_tokens_are_full_attentions(change, rows):
    change = dict(change)
    if change.pop("lossy", False):
        change["codec"] = policies.named("yakv").codec
    model, ids = make(), tokens(220, rows=rows)
    mask = torch.ones_like(ids)
    mask[-1, : 60 * (rows - 1)] = 0
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **options)
    with attach(model, replace(verified(), **change), hot_tokens=100, prefill_tokens=64) as attached:
        found = model.generate(ids, **options)
        assert torch.equal(found, expected)
        told = attached.ledger.snapshot()
        assert told["verifies"] > 0 and told["accepted"] <= told["drafted"] and told["generated"] == 40


def test_verified_goes_on_where_it_stopped():
    model, ids, more = make(), tokens(200), tokens(30, seed=3)
    options = {"max_new_tokens": 25, "do_sample": False}
    one = model.generate(ids, **options)
    two = model.generate(torch.cat([one, more], 1), **options)
    with attach(model, verified(), hot_tokens=100, prefill_tokens=64) as attached:
        cache = attached.new_cache()
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), one)
        assert cache.get_seq_length() == 224
        assert torch.equal(model.generate(torch.cat([one, more], 1), past_key_values=cache, **options), two)
        cache.close()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_verified_with_windows_and_norms(kind):
    model, ids = make(kind), tokens(220)
    options = {"max_new_tokens": 60, "do_sample": False}
    expected = model.generate(ids, **options)
    with attach(model, verified(), hot_tokens=100, prefill_tokens=64):
        assert torch.equal(model.generate(ids, **options), expected)


def test_verified_stops_where_generate_stops():
    model, ids = make(), tokens(200)
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    end = int(plain[0, 230])
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": end}
    expected = model.generate(ids, **options)
    with attach(model, verified(), hot_tokens=100) as attached:
        cache = attached.new_cache()
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
        cache.close()


@pytest.mark.parametrize("where", ["argument", "configuration"])
def test_a_verified_generation_ends_at_a_stop_string(where):
    model, ids = make(), tokens(150)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    plain = {"max_new_tokens": 40, "do_sample": False}
    found = model.generate(ids, **plain)[0, 160:].tolist()
    strings = [tokenizer.decode(next(pair for pair in pairwise(found) if max(pair) < 95))]  # whole letters
    if where == "argument":
        asked = {**plain, "stop_strings": strings, "tokenizer": tokenizer}
    else:
        asked = {"generation_config": GenerationConfig(**plain, stop_strings=strings), "tokenizer": tokenizer}
    expected = model.generate(ids, **asked)
    assert expected.shape[1] < 190
    with attach(model, verified(), hot_tokens=100):
        assert torch.equal(model.generate(ids, **asked), expected)
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(ids, stop_strings=strings, **plain)


def test_no_more_is_on_its_way_between_steps_than_there_is_room_for(tmp_path):
    model, ids = make(), tokens(250)
    policy = replace(EVERYTHING, selector=TopK(0.9), index=TrueKeys(), prefetch=True, late_mass=1.0)
    with attach(model, policy, hot_tokens=120, host=None, disk=f"{tmp_path}:64MiB") as attached:
        cache = attached.new_cache()
        stepped(model, ids, cache, [150, 1, 1])
        states = [layer.state for layer in cache.tiered]
        coming = [sum(brought.count for brought in state.ahead.fetches) for state in states]
        assert max(coming) == cache.setting.late_pages < cache.ledger.pages["late"]
        assert all(state.pool.slots + cache.setting.late_pages == cache.setting.budget.pool for state in states)
        cache.measure()
        held = sum(state.tail.nbytes + state.pool.nbytes + sum(each.nbytes for each in state.sinks) for state in states)
        assert cache.ledger.sizes["hot"] == held + sum(coming) * states[0].shape.numbers * 4
        cache.close()


@pytest.mark.parametrize("parts", [[150], [100, 48, 2], [144, *[1] * 6]])
def test_the_last_queries_of_a_prompt_are_kept_whatever_parts_it_comes_in(parts):
    model, ids = make(), tokens(150)
    with attach(model, EVERYTHING, hot_tokens=80) as attached:
        cache = attached.new_cache()
        with cache.exactly():
            stepped(model, ids, cache, parts)
        whole = attached.new_cache()
        stepped(model, ids, whole, [150])
        for one, other in zip(cache.tiered, whole.tiered, strict=True):
            assert torch.allclose(one.state.last_queries, other.state.last_queries, atol=1e-4)
        cache.close()
