"""Common part of the indexes: tensors that grow with the pages, empty until the first of them."""

from __future__ import annotations

import torch

from stepwell.longctx.parts.index.growing import Growing
from stepwell.longctx.shape import PageShape


class Stored:
    """`each`: rows a page has in these tensors. A subclass makes rows of keys and reads them; what it keeps besides is
    forgotten with the last page."""

    def __init__(self, shape: PageShape, each: int) -> None:
        self.shape = shape
        self._each = each
        self._tensors: list[Growing] = []

    def extend(self, *tensors: torch.Tensor) -> None:
        """[L, H, m * each, ...] each, always as many tensors, in the same order."""
        if self._tensors:
            for kept, more in zip(self._tensors, tensors, strict=True):
                kept.append(more)
        else:
            self._tensors = [Growing(first) for first in tensors]

    def used(self, at: int) -> torch.Tensor:
        return self._tensors[at].used

    @property
    def empty(self) -> bool:
        return not self._tensors

    def nothing(self, query: torch.Tensor) -> torch.Tensor:
        """The scores of no pages."""
        return query.new_empty((*query.shape[:3], 0), dtype=torch.float32)

    def crop(self, pages: int) -> None:
        if not pages:
            self._tensors = []
        for kept in self._tensors:
            kept.crop(pages * self._each)

    def rows(self, lanes: torch.Tensor) -> None:
        for kept in self._tensors:
            kept.rows(lanes)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._tensors)
