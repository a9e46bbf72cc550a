"""Attention over paged KV with what plain torch has: the flash kernel that it carries, and nothing compiled here.

A chunk of a prompt attends to what lies in pages and to itself. The two parts are computed apart, each by the flash
kernel, and joined by their log-sum-exp: the kernel's own causal mask is for squares only. Where a group of query heads
shares a KV head, the group's queries are further rows for what is not masked, so that KV is read once, as it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = Any


def gathered(layer: Tensor, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """K and V, [heads, tokens, head], of the first `tokens` tokens in these pages: one copy."""
    heads, page, content = layer.shape[1:]
    flat = layer.transpose(0, 1).index_select(1, pages).view(heads, len(pages) * page, content)
    half = content // 2
    return flat[:, :tokens, :half], flat[:, :tokens, half:]


def flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """[heads, tokens, head] each, as many heads in each: the output, and the log-sum-exp of each row in float32."""
    ops = torch.ops.aten
    run = ops._scaled_dot_product_flash_attention_for_cpu if query.device.type == "cpu" else None
    run = run or ops._scaled_dot_product_flash_attention
    out, lse = run(query[None], key[None], value[None], 0.0, causal)[:2]
    return out[0], lse[0, :, : query.shape[1]].float()


def attend(query: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor] | None) -> Tensor:
    """A chunk's queries, [heads, tokens, head], over its own K and V (causal) and all of the context's, [KV heads,
    tokens, head] each."""
    heads, tokens, head = query.shape
    kv_heads = own[0].shape[0]
    group = heads // kv_heads
    key, value = (kv.repeat_interleave(group, 0) for kv in own)
    out, lse = flash(query, key, value, causal=True)
    if context is None:
        return out
    rows = query.reshape(kv_heads, group * tokens, head)
    before, lse_before = flash(rows, *context, causal=False)
    before, lse_before = before.reshape(heads, tokens, head), lse_before.reshape(heads, tokens)
    share = torch.sigmoid(lse_before - lse)[..., None]
    return torch.lerp(out.float(), before.float(), share).to(query.dtype)


def attend_one(query: Tensor, layer: Tensor, table: Tensor, seen: Tensor) -> Tensor:
    """A token of each request, [batch, heads, head], over the pages of its row of `table`; `seen`, [batch, 1, 1,
    tokens], is true for tokens that it looks at."""
    kv_heads, page, content = layer.shape[1:]
    batch, pages = table.shape
    heads, head = query.shape[1:]
    flat = layer.transpose(0, 1).index_select(1, table.reshape(-1))
    flat = flat.view(kv_heads, batch, pages * page, content).transpose(0, 1)
    rows = query.view(batch, kv_heads, heads // kv_heads, head)
    mask = seen.expand(batch, kv_heads, rows.shape[2], pages * page)
    out = torch.nn.functional.scaled_dot_product_attention(rows, flat[..., :head], flat[..., head:], attn_mask=mask)
    return out.reshape(batch, heads, head)


def write(layer: Tensor, pages: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Token i, [tokens, KV heads, head], to place `places[i]` of page `pages[i]`."""
    layer[pages, :, places] = torch.cat((key, value), -1)


def numbers(values: Sequence[int], device: Any) -> Tensor:
    """On the device, by a copy that nobody waits for."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def where(pages: Sequence[int], start: int, count: int, page: int, device: Any) -> tuple[Tensor, Tensor]:
    """Pages and places of tokens [start, start + count) of a request with these pages."""
    tokens = torch.arange(start, start + count, device=device)
    return numbers(pages, device)[tokens // page], tokens % page
