"""What stepwell relies on in transformers: a release that changes one of these facts fails here, by its name."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer, get_layer_types_and_kwargs
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from tests.longctx.models import CONFIGS, make, tokens

CALLS: list[str] = []


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states, value_states): ...

    def update(self, key_states, value_states, *args, **kwargs):
        CALLS.append(f"update {tuple(key_states.shape)}")
        self.length += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        CALLS.append("mask sizes")
        return self.length + query_length, 0

    def get_seq_length(self):
        return self.length

    def get_max_length(self):
        return -1


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    CALLS.append(f"attention {module.layer_idx} {scaling is not None} {'past_key_values' in kwargs}")
    return query.transpose(1, 2).contiguous(), None


def _mask(*, mask_function, attention_mask, kv_length, **kwargs):
    CALLS.append(f"mask {mask_function is causal_mask_function} {attention_mask.dtype} {kv_length}")
    return None


AttentionInterface.register("stepwell-facts", _attention)
AttentionMaskInterface.register("stepwell-facts", _mask)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_order_of_the_calls(kind):
    """Mask sizes are asked before `update`; attention follows its layer's `update` at once, with the same layer_idx,
    and is not told of the cache; a registered mask function gets the padding mask as bool."""
    model, ids = make(kind), tokens(7, rows=2)
    model.set_attn_implementation("stepwell-facts")
    CALLS.clear()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=Cache(layers=[_Layer() for _ in range(2)]))
    assert CALLS[:2] == ["mask sizes", "mask True torch.bool 7"]
    rest = [call for call in CALLS if call.startswith(("update", "attention"))]
    assert rest == [call for n in range(2) for call in ("update (2, 2, 7, 16)", f"attention {n} True False")]


def test_windows_ask_for_their_own_mask():
    model, ids = make("gemma3"), tokens(7)
    model.set_attn_implementation("stepwell-facts")
    CALLS.clear()
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=DynamicCache(config=model.config))
    assert {call for call in CALLS if call.startswith("mask ")} == {"mask True torch.bool 7", "mask False torch.bool 7"}


def test_layers_that_must_be_overridden():
    """All that acts on `keys` and `values` of a layer. A new method would act on tensors that we do not have."""
    acting = {name for name in vars(CacheLayerMixin) if not name.startswith("_")}
    assert acting == {
        "is_compileable", "is_croppable", "supports_early_init", "lazy_initialization", "update", "get_mask_sizes",
        "get_seq_length", "get_max_length", "offload", "prefetch", "reset", "reorder_cache", "get_max_cache_shape",
    }  # fmt: skip
    assert {"crop", "batch_repeat_interleave", "batch_select_indices"} <= set(dir(DynamicCache))


def test_windows_of_the_cache():
    assert list(inspect.signature(DynamicSlidingWindowLayer.__init__).parameters)[:2] == ["self", "sliding_window"]
    assert hasattr(DynamicSlidingWindowLayer, "activate_past_recording")


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_layer_types_are_told(kind):
    assert len(get_layer_types_and_kwargs(CONFIGS[kind])[0]) == 2


def test_masks_of_sdpa():
    made = sdpa_mask(
        batch_size=1, q_length=2, kv_length=5, q_offset=3, attention_mask=None, allow_is_causal_skip=False, device="cpu"
    )
    assert made.dtype == torch.bool and made[0, 0].tolist() == [[True] * 4 + [False], [True] * 5]


def test_generate_takes_a_decoding_method():
    assert "custom_generate" in inspect.signature(make().generate).parameters
