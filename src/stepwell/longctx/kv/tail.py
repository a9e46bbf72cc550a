"""The most recent tokens of a layer, on the model's device, in a buffer that is written in place."""

from __future__ import annotations

import torch

_GROW = 1.5
_SPARE = 64


class Tail:
    """K and V of [B, H, n, D]. Tokens are appended at the end and leave at either end; the buffer shrinks when most of
    it is empty, so that what it takes stays in proportion to what it holds."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes shapes (of all but the tokens), dtypes and device from these tensors, not their contents."""
        self._keys, self._values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def keys(self) -> torch.Tensor:
        """A view, valid until the next change."""
        return self._keys[:, :, self._start : self._end]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, :, self._start : self._end]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._keys.nbytes + self._values.nbytes

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        count = keys.shape[2]
        if self._end + count > self._keys.shape[2]:
            wanted = len(self) + count
            # A part of a prompt comes at once and mostly leaves at once: no spare room in proportion to that.
            self._move(wanted + _SPARE if count > 1 else max(int(wanted * _GROW), wanted + _SPARE))
        self._keys[:, :, self._end : self._end + count] = keys
        self._values[:, :, self._end : self._end + count] = values
        self._end += count

    def drop_front(self, count: int, room: int) -> None:
        """The buffer is left with room for about `room` tokens."""
        self._start += count
        room = max(room, len(self)) + _SPARE
        if self._keys.shape[2] > room:
            self._move(room)

    def drop_back(self, count: int) -> None:
        self._end -= count

    def rows(self, rows: torch.Tensor) -> None:
        """Makes row i a copy of row `rows[i]`."""
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def _move(self, room: int) -> None:
        count = len(self)
        for name in ("_keys", "_values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_empty(*old.shape[:2], room, old.shape[3])
            new[:, :, :count] = old[:, :, self._start : self._end]
            setattr(self, name, new)
        self._start, self._end = 0, count
