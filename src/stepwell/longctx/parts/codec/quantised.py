"""Asymmetric codes per token and head: K8V4 of TTKV (arXiv 2604.19769), with the grouping of our measurements (the
paper leaves it open)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.codec.layout import Layout, PagePiece
from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.numbers import FP16_MAX, half_above, half_below, pack, packed_width, unpack
from stepwell.longctx.shape import PageShape


@dataclass(frozen=True, slots=True)
class Quantised:
    """Codes of 2, 4 or 8 bits with a least number and a step in fp16 for each head and token of K, and again of V.

    Guaranteed for finite K and V: a number that comes back is finite, and at most half its row's stored step away from
    what went in, up to the rounding of float32 and then of the model's dtype; numbers beyond +-65504 count as +-65504.
    A row of one number that fp16 has comes back exactly. A row that does not fill its last byte (an odd dimension with
    4 bits) is filled up.
    """

    key_bits: int = 8
    value_bits: int = 4

    def __post_init__(self) -> None:
        require({self.key_bits, self.value_bits} <= {2, 4, 8}, self, "codes have 2, 4 or 8 bits")

    def build(self, shape: PageShape, dtype: torch.dtype) -> Codes:
        return Codes(shape, dtype, self.key_bits, self.value_bits)


class Codes:
    """`PageCodec` of asymmetric codes. Payload: codes, minima and steps of K, then of V."""

    lossless = False

    def __init__(self, shape: PageShape, dtype: torch.dtype, key_bits: int, value_bits: int) -> None:
        self._sides = ((shape.key_dim, key_bits), (shape.value_dim, value_bits))
        rows, scale = (shape.heads, shape.tokens), PagePiece((shape.heads, shape.tokens, 1), torch.float16)
        self._layout = Layout(
            tuple(
                piece
                for dim, bits in self._sides
                for piece in (PagePiece((*rows, packed_width(dim, bits)), torch.uint8), scale, scale)
            )
        )
        self._dtype = dtype
        self.page_bytes = self._layout.page_bytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        (_, key_bits), (_, value_bits) = self._sides
        return self._layout.join([*_encoded(keys, key_bits), *_encoded(values, value_bits)])

    def decode(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = self._layout.split(payload)
        (key_dim, key_bits), (value_dim, value_bits) = self._sides
        keys = self._decoded(pieces[:3], key_dim, key_bits)
        return keys, self._decoded(pieces[3:], value_dim, value_bits)

    def _decoded(self, pieces: list[torch.Tensor], dim: int, bits: int) -> torch.Tensor:
        packed, least, step = pieces
        numbers = torch.addcmul(least.float(), unpack(packed, bits, dim).float(), step.float())
        if self._dtype == torch.float16:  # up to half a step beyond the greatest number may be beyond fp16
            numbers = numbers.clamp_(-FP16_MAX, FP16_MAX)
        return numbers.to(self._dtype)


def _encoded(numbers: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The least number is rounded down and the step up, so that the codes reach all of the row."""
    numbers = numbers.float().clamp(-FP16_MAX, FP16_MAX)
    least = half_below(numbers.amin(-1, keepdim=True))
    offsets = numbers - least.float()
    levels = 2**bits - 1
    step = half_above(offsets.amax(-1, keepdim=True) / levels)
    codes = (offsets / step.float().clamp(min=2.0**-24)).round_()  # 0 / 0 has no code
    return pack(codes.to(torch.uint8), bits), least, step
