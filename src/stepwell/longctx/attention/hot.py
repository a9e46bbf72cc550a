"""Attention over what never left the model's device: all of a short context, or its sinks and its tail."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.merge import PartialAttention, attend, finish, merge, sink
from stepwell.longctx.kv.lanes import Lanes
from stepwell.longctx.kv.layer import LayerState


def all_hot(layer: LayerState, query: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Attention as in transformers, for a layer without cold pages."""
    keys, values = layer.tail.keys, layer.tail.values
    seen = causal(query, keys.shape[2], asked.mask)
    if asked.softcap is None and asked.sinks is None:
        output = scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=seen,
            is_causal=seen is None and query.shape[2] > 1,
            scale=asked.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return output.transpose(1, 2).contiguous()
    return capped(query, keys, values, asked, seen, layer.lanes)


def capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    asked: Asked,
    seen: torch.Tensor | None,
    lanes: Lanes | None = None,
) -> torch.Tensor:
    """Attention with soft caps or learned sinks, which SDPA does not support, over everything at once: [B, query heads,
    Q, D] to [B, Q, query heads, Dv]. `seen`: [B or 1, 1, Q, N], bool or added to logits (0 and very negative); None:
    causal."""
    lanes = lanes or Lanes(keys.shape[1], joint=True)
    if seen is None:
        seen = lower(query.shape[2], keys.shape[2], query.device)
    if seen.dtype != torch.bool:
        seen = seen >= 0
    visible = lanes.masks(seen.expand(query.shape[0], -1, -1, -1))[:, :, None]
    part = attend(
        lanes.queries(query),
        lanes.split(keys),
        lanes.split(values),
        scale=asked.scale,
        softcap=asked.softcap,
        valid=visible,
    )
    if asked.sinks is not None:
        part = merge(part, sink(by_lane(lanes, query.shape[0], asked.sinks), part))
    return lanes.outputs(finish(part)).to(query.dtype)


def hot_part(layer: LayerState, query: torch.Tensor, asked: Asked) -> PartialAttention:
    """Attention over sinks and tail, each query up to itself."""
    assert layer.sinks is not None
    lanes, tail = layer.lanes, layer.tail
    count = len(tail)
    seen = lower(query.shape[3], count, query.device)[:, :, None] if query.shape[3] > 1 else None
    before = None
    if asked.mask is not None:
        padding = lanes.masks(asked.mask)[:, None, None, None]
        seen = padding[..., layer.before_tail :] if seen is None else seen & padding[..., layer.before_tail :]
        before = padding[..., : layer.sinks[0].shape[2]]

    def over(states: tuple[torch.Tensor, torch.Tensor], visible: torch.Tensor | None) -> PartialAttention:
        keys, values = (lanes.split(each) for each in states)
        return attend(query, keys, values, scale=asked.scale, softcap=asked.softcap, valid=visible)

    part = over((tail.keys, tail.values), seen)
    return merge(over(layer.sinks, before), part) if layer.sinks[0].shape[2] else part


def causal(query: torch.Tensor, count: int, mask: torch.Tensor | None) -> torch.Tensor | None:
    """[B or 1, 1, Q, count] bool; None where SDPA's own rule is right: one query, or as many as keys, no padding."""
    steps = query.shape[2]
    if mask is None and steps in (1, count):
        return None
    seen = lower(steps, count, query.device)
    if mask is None:
        return seen
    # A row of padding sees nothing, and softmax over nothing is NaN: it may see itself.
    own = torch.arange(count - steps, count, device=query.device)
    return (seen & mask[:, None, None, -count:]) | (own[:, None] == torch.arange(count, device=query.device))


def lower(steps: int, count: int, device: torch.device) -> torch.Tensor:
    """[1, 1, steps, count]: the last `steps` of `count` tokens see themselves and what came before."""
    return torch.ones(steps, count, dtype=torch.bool, device=device).tril(count - steps)[None, None]


def by_lane(lanes: Lanes, rows: int, sinks: torch.Tensor) -> torch.Tensor:
    """[query heads] to [L, H, G, 1]."""
    return lanes.split(sinks.view(1, lanes.kv_heads, -1, 1).expand(rows, -1, -1, -1))
