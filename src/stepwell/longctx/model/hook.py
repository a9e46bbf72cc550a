"""The handshake with transformers: it passes the cache of an attention's keys to the attention function.

Attention modules call `cache.update(k, v, layer)` and then the attention function of the model's configuration, which
gets no cache. So `update` of a layer of ours leaves itself in a context variable, and the function takes it from there,
checks that it is this module's layer, and does all the rest. Where there is none (no cache, another cache, a sliding
layer) the function is SDPA. Read in transformers 5.17 to 5.19; `tests/longctx/test_facts.py` checks it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from stepwell.errors import Unsupported
from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.dispatch import attention
from stepwell.longctx.attention.hot import capped
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.setting import CacheSetting

NAME = "stepwell"
_waiting: ContextVar[tuple[LayerState, torch.Tensor] | None] = ContextVar("stepwell-layer", default=None)
"""The layer that was updated last, and the new keys as it handed them on."""


def register() -> None:
    """Makes `NAME` an attention implementation of transformers. Idempotent. Without the mask function padding would be
    ignored in silence (measured: logits off by 5.5)."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def leave(layer: LayerState, keys: torch.Tensor) -> None:
    """Called by `update`: the next attention of this thread is this layer's, with these new keys. Raises Unsupported
    SW-715 if the one before never came: the model attends in another way, and over the new tokens alone."""
    before = _waiting.get()
    _waiting.set((layer, keys))
    if before is not None and before[0].setting is layer.setting:
        _waiting.set(None)
        raise _refused(
            f"layer {before[0].number} of the cache was filled and not attended over",
            f"the model's attention implementation is not {NAME!r} (use attach), or its attention was interrupted",
        )


def forget(setting: CacheSetting) -> None:
    """Forgets a layer of this cache that waits for its attention in this thread."""
    before = _waiting.get()
    if before is not None and before[0].setting is setting:
        _waiting.set(None)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The padding alone for plain causal attention, [B, tokens] bool, or None if there is none: a whole mask of 128K x
    128K is not affordable. SDPA's mask for anything else (sliding windows, packed sequences, images)."""
    if mask_function is causal_mask_function:
        if attention_mask is None or attention_mask.dim() != 2:
            return attention_mask
        padding = attention_mask[:, :kv_length].bool()
        if padding.shape[1] < kv_length:
            padding = torch.nn.functional.pad(padding, (kv_length - padding.shape[1], 0), value=True)
        return None if bool(padding.all()) else padding
    found: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return found


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    waiting = _waiting.get()
    if waiting is None:
        return _untiered(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, options)
    _waiting.set(None)
    layer, keys = waiting
    number = getattr(module, "layer_idx", None)
    if number != layer.number:
        raise _refused(
            f"layer {layer.number} of the cache met attention of layer {number}",
            "a layer was updated whose attention did not follow: the model is not built as stepwell knows it",
        )
    if key is not keys:
        raise _refused(
            f"the keys of layer {layer.number} are not those that its cache was given",
            "a pass with that cache was interrupted before its attention (this one may be tried again), or the model "
            "changes keys behind its cache",
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise _refused("the attention mask has four axes", "only padding and causal masks can be applied across tiers")
    if dropout:
        raise _refused("attention drops out at random", "tiering is for inference; call model.eval()")
    if options.get("sliding_window") is not None or options.get("position_bias") is not None:
        raise _refused("this layer has a window or a position bias", "its cache layer was expected to be of that kind")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attention(layer, query, Asked(scale, softcap, s_aux, attention_mask)), None


def _untiered(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    steps, count = query.shape[2], key.shape[2]
    if (mask is not None and mask.dim() == 2) or (mask is None and steps > 1 and steps != count):
        mask = sdpa_mask(
            batch_size=query.shape[0],
            q_length=steps,
            kv_length=count,
            q_offset=count - steps,
            attention_mask=mask,
            allow_is_causal_skip=False,
            device=query.device,
        )
    if softcap is not None or sinks is not None:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return capped(query, key, value, Asked(scale, softcap, sinks), mask), None
    found: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **options
    )
    return found


def _refused(what: str, why: str) -> Unsupported:
    return Unsupported(
        "SW-715",
        what=f"this attention cannot be used across tiers: {what}",
        why=why,
        fix="use the model without stepwell.longctx, or report it",
    )
