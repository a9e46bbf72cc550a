"""KV tensors as vLLM lays them out: per layer a view [pages, heads, tokens, content] of one buffer.

Content is K and V of a head and token together. The physical order is named as vLLM names it, by its dimensions from
the outermost in: L layers, B pages, H heads, N tokens, C content. Where L and B are not the two outermost, a page is
not one run of bytes, and copies refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from lab.bench.gpu.engine.attention import numbers

Tensor = Any


class Layout(Enum):
    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    LHBNC = "LHBNC"
    BHLNC = "BHLNC"

    @property
    def compact(self) -> bool:
        """A page of a layer is one run of bytes."""
        return self.value[:2] in ("LB", "BL")


COMPACT = tuple(layout for layout in Layout if layout.compact)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.uint8}
"""By the name of their numbers; vLLM keeps those of 8 bits as bytes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`page`: tokens of a page. `content`: numbers of K and V of one head and token. MLA has one head. `pad`: numbers
    behind each page that belong to nobody."""

    layers: int
    pages: int
    heads: int
    page: int
    content: int
    dtype: str = "bfloat16"
    pad: int = 0

    @property
    def row_bytes(self) -> int:
        """Of a page in one layer."""
        return self.heads * self.page * self.content * DTYPES[self.dtype].itemsize

    @property
    def page_bytes(self) -> int:
        return self.layers * self.row_bytes


@dataclass(frozen=True, slots=True)
class Kv:
    """`buffer` is all of its memory as bytes, padding included; `caches` are the layers' views of it, by name."""

    shape: Shape
    layout: Layout
    buffer: Tensor
    caches: dict[str, Tensor]

    @classmethod
    def make(cls, shape: Shape, layout: Layout, device: str) -> Kv:
        """Zeros."""
        sizes = {"L": shape.layers, "B": shape.pages, "H": shape.heads, "N": shape.page, "C": shape.content}
        strides, step = {}, 1
        for name in reversed(layout.value):
            step += shape.pad if name == "B" else 0
            strides[name] = step
            step *= sizes[name]
        memory = torch.zeros(step, dtype=DTYPES[shape.dtype], device=device)
        size, stride = [sizes[name] for name in "BHNC"], [strides[name] for name in "BHNC"]
        caches = {f"layer.{n}": memory.as_strided(size, stride, n * strides["L"]) for n in range(shape.layers)}
        return cls(shape, layout, memory.view(torch.uint8), caches)

    @property
    def device(self) -> str:
        return str(self.buffer.device.type)

    @property
    def layers(self) -> list[Tensor]:
        return list(self.caches.values())

    @property
    def words(self) -> list[Tensor]:
        """The layers as bytes, [pages, heads, tokens, bytes]: numbers that are none (NaN) compare, too."""
        return [layer.view(torch.uint8) for layer in self.caches.values()]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, padding included."""
        generator = torch.Generator(self.buffer.device).manual_seed(seed)
        self.buffer.random_(0, 256, generator=generator)

    def poison(self, pages: list[int], byte: int = 0xA5) -> None:
        """Overwrites these pages, in the order of the device's work."""
        if pages:
            which = numbers(pages, self.buffer.device)
            for layer in self.words:
                layer.index_fill_(0, which, byte)
