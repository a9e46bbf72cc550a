"""int8 with one fp16 scale per channel or token. Keys per channel, values per token is KIVI's grouping (arXiv
2402.02750): channels of keys differ far more in size than tokens do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from stepwell.longctx.parts.codec.layout import Layout, PagePiece
from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.numbers import FP16_MAX, half_above
from stepwell.longctx.shape import PageShape

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """Symmetric int8: K with a scale per head and channel over the page ("channel") or per head and token ("token"),
    V per head and token.

    Guaranteed for finite K and V: a number that comes back is finite, and at most half its stored scale away from what
    went in, up to the rounding of float32 and then of the model's dtype; the scale is the greatest size in its group
    divided by 127, rounded up to fp16. Numbers beyond +-65504 count as +-65504.
    """

    keys: Literal["channel", "token"] = "channel"

    def __post_init__(self) -> None:
        require(self.keys in ("channel", "token"), self, 'the scales of keys are per "channel" or per "token"')

    def build(self, shape: PageShape, dtype: torch.dtype) -> Scaled:
        return Scaled(shape, dtype, key_axis=-2 if self.keys == "channel" else -1)


class Scaled:
    """`PageCodec` of int8 numbers. Payload: codes and scales of K, then of V. `key_axis`: axis of [m, H, P, D] along
    which numbers share a scale."""

    lossless = False

    def __init__(self, shape: PageShape, dtype: torch.dtype, key_axis: int) -> None:
        rows = (shape.heads, shape.tokens)
        key_scales = (shape.heads, 1, shape.key_dim) if key_axis == -2 else (*rows, 1)
        self._layout = Layout(
            (
                PagePiece((*rows, shape.key_dim), torch.int8),
                PagePiece(key_scales, torch.float16),
                PagePiece((*rows, shape.value_dim), torch.int8),
                PagePiece((*rows, 1), torch.float16),
            )
        )
        self._dtype, self._key_axis = dtype, key_axis
        self.page_bytes = self._layout.page_bytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._layout.join([*_encoded(keys, self._key_axis), *_encoded(values, -1)])

    def decode(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, key_scales, values, value_scales = self._layout.split(payload)
        return self._decoded(keys, key_scales), self._decoded(values, value_scales)

    def _decoded(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        numbers = codes.float().mul_(scales.float())
        if self._dtype == torch.float16:  # a scale that was rounded up may lead beyond fp16
            numbers = numbers.clamp_(-FP16_MAX, FP16_MAX)
        return numbers.to(self._dtype)


def _encoded(numbers: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = numbers.float().clamp(-FP16_MAX, FP16_MAX)
    scales = half_above(numbers.abs().amax(axis, keepdim=True) / LEVELS)
    codes = (numbers / scales.float().clamp(min=2.0**-24)).round_()  # 0 / 0 has no code
    return codes.to(torch.int8), scales
