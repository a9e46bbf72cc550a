"""The same model has the same fingerprint however it was loaded; what changes what it computes gives another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from stepwell.errors import IdentityMismatch
from stepwell.longctx.saved.fingerprint import fingerprint

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def build(kind: type = LlamaConfig, **settings: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(kind(**SIZES, **settings))


def test_the_same_weights_loaded_twice(tmp_path: Path) -> None:
    model = build()
    expected = fingerprint(model)
    assert len(expected) == 32
    assert fingerprint(model) == expected
    for folder in ("one", "another"):
        model.save_pretrained(tmp_path / folder)
        for how in ({}, {"attn_implementation": "eager"}, {"dtype": torch.float32}):
            assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / folder, **how)) == expected
    model.eval()
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, pad_token_id=0)
    assert fingerprint(model) == expected


def flip(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[-1] ^= 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "a bit of a weight": lambda model: flip(model.model.layers[1].mlp.up_proj.weight),
    "a bit of a buffer": lambda model: flip(model.model.rotary_emb.inv_freq),
    "two weights exchanged": lambda model: exchange(model.model.layers[0].self_attn, model.model.layers[1].self_attn),
    "the dtype": lambda model: model.to(torch.bfloat16),
    "the class": lambda model: setattr(model, "__class__", type("Other", (type(model),), {})),
    "a setting": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
}


def exchange(one: Any, other: Any) -> None:
    one.k_proj.weight, other.k_proj.weight = other.k_proj.weight, one.k_proj.weight


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_it_computes_with_counts(change: Callable[[Any], object]) -> None:
    model = build()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_rope_window_and_class_count() -> None:
    models = [
        build(),
        build(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        build(MistralConfig, sliding_window=64),
        build(MistralConfig, sliding_window=65),
        build(MistralConfig, sliding_window=None),
        build().model,
    ]
    assert len({fingerprint(model) for model in models}) == len(models)


def test_weights_in_any_order_of_bytes_and_dtype() -> None:
    """bfloat16 has no counterpart in numpy; a transposed weight lies in another order."""
    model = build().to(torch.bfloat16)
    expected = fingerprint(model)
    weight = model.lm_head.weight
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous() and fingerprint(model) == expected


def test_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(IdentityMismatch, match=r"not in memory.*SW-403"):
        fingerprint(model)


def test_adapters() -> None:
    """As `peft` puts them into a model."""
    model = build()
    layer = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.q_proj = layer(32, 32)
    with pytest.raises(IdentityMismatch, match=r"adapters.*SW-403"):
        fingerprint(model)
