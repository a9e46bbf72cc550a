"""Common part of the indexes: tensors that grow with the pages, empty until the first of them."""

from __future__ import annotations

import torch

from stepwell.longctx.shape import PageShape


class Growing:
    """[L, H, n, ...] whose n grows and shrinks. Room is doubled when it is used up, so that adding costs a bounded
    number of copies a row; lanes, heads, dtype and device are those of the first rows. `used` is a view: valid until
    the next call."""

    def __init__(self, first: torch.Tensor) -> None:
        self._room = first.detach().clone(memory_format=torch.contiguous_format)
        self._used = first.shape[2]

    @property
    def used(self) -> torch.Tensor:
        return self._room[:, :, : self._used]

    def append(self, more: torch.Tensor) -> None:
        needed = self._used + more.shape[2]
        if needed > self._room.shape[2]:
            lanes, heads, room, *rest = self._room.shape
            grown = self._room.new_empty((lanes, heads, max(needed, 2 * room), *rest))
            grown[:, :, : self._used] = self.used
            self._room = grown
        elif self._room.is_inference() and not torch.is_inference_mode_enabled():
            self._room = self._room.clone()  # made in a mode that forbids writing to it here
        self._room[:, :, self._used : needed] = more.detach()
        self._used = needed

    def crop(self, count: int) -> None:
        self._used = min(self._used, count)

    def rows(self, lanes: torch.Tensor) -> None:
        self._room = self.used.index_select(0, lanes)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self.used.numel() * self._room.element_size()


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
