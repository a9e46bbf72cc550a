"""The model of the measurements computes what a plain one does, also in chunks, over pages and in a graph."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from lab.bench.gpu.engine.attention import attend, attend_one, gathered, write
from lab.bench.gpu.engine.decoder import Decoder
from lab.bench.gpu.engine.kv import COMPACT, Kv, Layout
from lab.bench.gpu.engine.model import LLAMA_8B, TINY, Llama
from lab.bench.gpu.prefill import flops

Tensor = Any
PAGE = 16


def precision(device: str) -> tuple[str, float]:
    """Flash kernels for GPUs take no float32."""
    return ("float32", 1e-4) if device == "cpu" else ("bfloat16", 5e-2)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[heads, tokens, head] over [KV heads, tokens, head]; queries are those of the last tokens."""
    group, tokens, all_tokens = query.shape[0] // key.shape[0], query.shape[1], key.shape[1]
    key, value = (kv.float().repeat_interleave(group, 0) for kv in (key, value))
    hidden = ~torch.ones(tokens, all_tokens, dtype=torch.bool, device=query.device).tril(all_tokens - tokens)
    scores = (query.float() @ key.transpose(1, 2) / math.sqrt(query.shape[2])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("before", [0, 1, 13, 200])
@pytest.mark.parametrize("tokens", [1, 7, 96])
def test_attention_in_two_parts_is_attention(device: str, tokens: int, before: int) -> None:
    dtype, close = precision(device)
    generator = torch.Generator().manual_seed(5)

    def some(heads: int, count: int) -> Tensor:
        return torch.randn(heads, count, 64, generator=generator).to(device, getattr(torch, dtype))

    query, key, value = some(8, tokens), some(2, before + tokens), some(2, before + tokens)
    context = (key[:, :before], value[:, :before]) if before else None
    found = attend(query, (key[:, before:], value[:, before:]), context)
    assert torch.allclose(found.float(), plain(query, key, value), atol=close)


@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.value)
def test_decoding_attends_to_all_tokens_before_and_to_no_others(device: str, layout: Layout) -> None:
    dtype, close = precision(device)
    kv = Kv.make(TINY.kv(12, PAGE, dtype), layout, device)
    layer = kv.layers[1]
    generator = torch.Generator().manual_seed(6)
    layer.copy_(torch.randn(layer.shape, generator=generator))
    table = torch.tensor([[3, 7, 1], [2, 9, 0]], device=device)
    positions = torch.tensor([40, 20], device=device)
    seen = (torch.arange(3 * PAGE, device=device) <= positions[:, None])[:, None, None, :]
    query = torch.randn(2, TINY.heads, TINY.head, generator=generator).to(device, layer.dtype)
    found = attend_one(query, layer, table, seen)
    for row, position in enumerate(positions.tolist()):
        key, value = gathered(layer, table[row], position + 1)
        assert torch.allclose(found[row, :, None].float(), plain(query[row, :, None], key, value), atol=close)


def test_a_write_goes_where_a_gather_finds_it(device: str) -> None:
    kv = Kv.make(TINY.kv(8, PAGE, "bfloat16"), Layout.BLNHC, device)
    key, value = (torch.randn(20, 2, TINY.head, device=device).bfloat16() for _ in range(2))
    tokens = torch.arange(20, device=device)
    pages = torch.tensor([5, 2], device=device)
    write(kv.layers[0], pages[tokens // PAGE], tokens % PAGE, key, value)
    found = gathered(kv.layers[0], pages, 20)
    assert torch.equal(found[0], key.transpose(0, 1))
    assert torch.equal(found[1], value.transpose(0, 1))
    assert not kv.layers[1].any()


@torch.inference_mode()
def test_chunks_pages_and_the_decoder_lead_to_the_same_kv(device: str) -> None:
    dtype, close = precision(device)
    dice = random.Random(7)
    tokens = [dice.randrange(TINY.vocabulary) for _ in range(90)]
    pages = dice.sample(range(1, 20), 6)
    caches = []
    for how in ("whole", "chunks", "decoded"):
        kv = Kv.make(TINY.kv(20, PAGE, dtype), Layout.BLHNC, device)
        model = Llama(TINY, kv.layers)
        if how == "whole":
            model.prefill(tokens, 0, pages)
        elif how == "chunks":
            for start in range(0, 90, 25):
                model.prefill(tokens[start : start + 25], start, pages)
        else:
            model.prefill(tokens[:60], 0, pages)
            decoder = Decoder(model, 3, 8)
            assert (decoder.graph is not None) == (device == "cuda")
            for at in range(60, 90):
                decoder.run([torch.tensor(tokens[at], device=device)], [at], [pages])
        caches.append(torch.stack([gathered(layer, torch.tensor(pages, device=device), 90)[0] for layer in kv.layers]))
    whole, chunks, decoded = (cache.float() for cache in caches)
    assert torch.allclose(whole, chunks, atol=20 * close)
    assert torch.allclose(whole, decoded, atol=20 * close)


def test_the_large_shape_is_that_of_llama_8b() -> None:
    assert 8.0e9 < LLAMA_8B.parameters < 8.1e9
    assert LLAMA_8B.kv(1, 1, "bfloat16").page_bytes == 128 << 10, "of KV a token"
    assert flops(LLAMA_8B, 1024) == pytest.approx(2 * 7.0e9 * 1024, rel=0.05)
