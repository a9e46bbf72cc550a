"""A codec: how a page's K and V lie in a cold tier. Whole pages in, bytes out, scales included."""

from __future__ import annotations

from typing import Protocol

import torch

from stepwell.longctx.shape import PageShape


class PageCodec(Protocol):
    """Codec for pages of one shape and one dtype of the model."""

    lossless: bool
    """`decode(encode(x))` is x, bit for bit."""

    page_bytes: int
    """Bytes of one page, scales included."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[m, H, P, D] each to [m, page_bytes] uint8, on the same device."""

    def decode(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The other way round, in the model's dtype."""


class CodecKind(Protocol):
    """A codec as a policy names it."""

    def build(self, shape: PageShape, dtype: torch.dtype) -> PageCodec: ...
