"""A Llama-shaped model with dummy weights, in plain torch, over paged KV.

Its timings do not depend on the weights' values: the same products of the same sizes are computed whatever is in them,
and no kernel here looks. Its tokens mean nothing, but they depend on every byte of KV that they should.

What a serving engine does better: attention kernels that read pages where they lie (here a chunk's context is copied
together first; the benchmark takes that out again), fused norms and activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lab.bench.gpu.engine.attention import attend, attend_one, gathered, numbers, where, write
from lab.bench.gpu.engine.kv import Shape

Tensor = Any
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values), [tokens, heads, head] each -> [tokens, heads, head]"""


@dataclass(frozen=True, slots=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    theta: float = 500_000.0

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp) + 2 * self.vocabulary * self.width

    def kv(self, pages: int, page: int, dtype: str) -> Shape:
        return Shape(self.layers, pages, self.kv_heads, page, 2 * self.head, dtype)


LLAMA_8B = Config(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocabulary=128_256)
TINY = Config(layers=2, width=64, heads=4, kv_heads=2, mlp=128, vocabulary=512)


class Llama:
    """`layers` are the KV tensors, [pages, KV heads, tokens, 2 x head] each. Call it in `torch.inference_mode`."""

    def __init__(self, config: Config, layers: Sequence[Tensor], seed: int = 1) -> None:
        self.config = config
        self.kv = list(layers)
        self.device, dtype = layers[0].device, layers[0].dtype
        self.page = layers[0].shape[2]
        generator = torch.Generator(self.device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, dtype=dtype, device=self.device)
            return made.normal_(0.0, 1 / math.sqrt(columns), generator=generator)

        c = config
        self._qkv = [weight((c.heads + 2 * c.kv_heads) * c.head, c.width) for _ in range(c.layers)]
        self._out = [weight(c.width, c.heads * c.head) for _ in range(c.layers)]
        self._up = [weight(2 * c.mlp, c.width) for _ in range(c.layers)]
        self._down = [weight(c.width, c.mlp) for _ in range(c.layers)]
        self._embedding, self._vocabulary = weight(c.vocabulary, c.width), weight(c.vocabulary, c.width)
        powers = torch.arange(0, c.head, 2, device=self.device, dtype=torch.float32) / c.head
        self._frequencies = c.theta**-powers

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> Tensor:
        """Computes tokens [start, start + n) of a request with these pages; the token that follows, on the device."""
        count = len(tokens)
        which, places = where(pages, start, count, self.page, self.device)
        before = numbers(pages[: -(-start // self.page)], self.device) if start else None

        def attention(n: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer = self.kv[n]
            context = gathered(layer, before, start) if before is not None else None
            write(layer, which, places, key, value)
            own = key.transpose(0, 1), value.transpose(0, 1)
            return attend(query.transpose(0, 1).contiguous(), own, context).transpose(0, 1)

        positions = torch.arange(start, start + count, device=self.device)
        return self._last(self._forward(numbers(tokens, self.device), positions, attention)[-1:])[0]

    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """A token of each request, and the one that follows each. `table`: its pages, [batch, pages]; 0 where it has
        none. Everything is on the device, and nothing waits for it: this may be captured in a CUDA graph."""
        which = table.gather(1, (positions // self.page)[:, None])[:, 0]
        places = positions % self.page
        tokens_seen = torch.arange(table.shape[1] * self.page, device=self.device)
        seen = (tokens_seen[None, :] <= positions[:, None])[:, None, None, :]

        def attention(n: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(self.kv[n], which, places, key, value)
            return attend_one(query, self.kv[n], table, seen)

        return self._last(self._forward(tokens, positions, attention))

    def gather(self, start: int, pages: Sequence[int]) -> None:
        """What `prefill` copies together before it attends to tokens [0, start), and nothing else."""
        before = numbers(pages[: -(-start // self.page)], self.device)
        for layer in self.kv:
            gathered(layer, before, start)

    def _forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        c, count = self.config, len(tokens)
        angles = positions[:, None].float() * self._frequencies
        turn = angles.cos()[:, None], angles.sin()[:, None]
        x = functional.embedding(tokens, self._embedding)
        for n in range(c.layers):
            qkv = functional.linear(_norm(x), self._qkv[n]).view(count, -1, c.head)
            query, key, value = qkv.split((c.heads, c.kv_heads, c.kv_heads), 1)
            mixed = attention(n, _turned(query, turn), _turned(key, turn), value)
            x = x + functional.linear(mixed.reshape(count, -1), self._out[n])
            gate, up = functional.linear(_norm(x), self._up[n]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, self._down[n])
        return x

    def _last(self, x: Tensor) -> Tensor:
        return functional.linear(_norm(x), self._vocabulary).argmax(-1)


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions."""
    cos, sin = turn
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
