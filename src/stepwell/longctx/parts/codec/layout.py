"""Layout of a page's payload: pieces (codes, scales) in sequence, each in its own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class PagePiece:
    """A piece of one page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    pieces: tuple[PagePiece, ...]

    @property
    def page_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[m, *piece] each, in this order, to [m, page_bytes] uint8."""
        rows = [tensor.flatten(1).contiguous().view(torch.uint8) for tensor in tensors]
        return torch.cat(rows, dim=1)

    def split(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The other way round. Copies: a payload may start at any byte, numbers may not."""
        parts = payload.split([piece.nbytes for piece in self.pieces], dim=1)
        return [
            part.clone(memory_format=torch.contiguous_format).view(piece.dtype).reshape(payload.shape[0], *piece.shape)
            for part, piece in zip(parts, self.pieces, strict=True)
        ]
