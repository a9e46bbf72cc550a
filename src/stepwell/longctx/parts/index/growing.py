"""A tensor that grows at its end: what indexes keep their rows in."""

from __future__ import annotations

import torch


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
