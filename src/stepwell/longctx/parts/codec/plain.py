"""K and V as the model has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.codec.layout import Layout, PagePiece
from stepwell.longctx.parts.numbers import FP16_MAX
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class Plain:
    """The model's own dtype, bit for bit (NaN and infinities too)."""

    def build(self, shape: PageShape, dtype: torch.dtype) -> Numbers:
        return Numbers(shape, dtype, dtype)


@dataclass(frozen=True, slots=True)
class Half:
    """fp16. Lossless if that is the dtype of the model; else a number keeps 11 significant bits (down to 2^-24), and
    one beyond +-65504 becomes that, so finite numbers stay finite."""

    def build(self, shape: PageShape, dtype: torch.dtype) -> Numbers:
        return Numbers(shape, dtype, torch.float16)


class Numbers:
    """A `PageCodec` that stores K, then V, in one dtype."""

    def __init__(self, shape: PageShape, dtype: torch.dtype, stored: torch.dtype) -> None:
        rows = (shape.heads, shape.tokens)
        self._layout = Layout((PagePiece((*rows, shape.key_dim), stored), PagePiece((*rows, shape.value_dim), stored)))
        self._dtype, self._stored = dtype, stored
        self.lossless = stored == dtype
        self.page_bytes = self._layout.page_bytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._layout.join([self._to_stored(keys), self._to_stored(values)])

    def decode(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._layout.split(payload)
        return keys.to(self._dtype), values.to(self._dtype)

    def _to_stored(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.lossless:
            return numbers
        return numbers.float().clamp(-FP16_MAX, FP16_MAX).to(self._stored)  # bf16 itself would round the bound up
