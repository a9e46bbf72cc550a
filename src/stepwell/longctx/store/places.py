"""Places of a store in use, with their numbers of owners. Pure bookkeeping in arrays: no loop over places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class StorePlaces:
    """Places 0 to `capacity` - 1. Memory grows with the places that were in use, 12 bytes each, until none is. Not
    thread-safe: its owner's lock is held around each call."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._forget()

    def _forget(self) -> None:
        self.touched = 0
        """Places that were taken since none was in use: all below this."""
        self._owners = np.zeros(0, np.int32)
        self._idle = np.zeros(0, np.int64)  # a stack of places that were taken and are not any more
        self._idles = 0

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def reach(self, count: int) -> int:
        """Value of `touched` after `count` more are taken."""
        return self.touched + max(0, count - self._idles)

    def take(self, count: int) -> Numbers:
        """`count` places, ascending, with one owner each; the caller has made sure that there is room. What was given
        back last goes first."""
        assert count <= self.room
        again = min(count, self._idles)
        fresh = count - again
        self._idles -= again
        taken = np.concatenate(
            [np.sort(self._idle[self._idles : self._idles + again]), np.arange(self.touched, self.touched + fresh)]
        )
        self.touched += fresh
        self.used += count
        self._owners = grown(self._owners, self.touched)
        self._owners[taken] = 1
        return taken

    def check(self, places: Numbers) -> None:
        """Raises ValueError for a place without owner."""
        if len(places) == 0:
            return
        inside = places.min() >= 0 and places.max() < self.touched
        if not inside or self._owners[places].min() < 1:
            raise ValueError("a place without owner: it was never given out, or was freed")

    def retain(self, places: Numbers) -> None:
        """Adds an owner to each place, as often as it is named. Raises as `check` does; then nothing changed."""
        self.check(places)
        np.add.at(self._owners, places, 1)

    def free(self, places: Numbers) -> Numbers:
        """Removes one owner for each time that a place is named; returns the places without owners. Raises ValueError
        if a place has fewer owners than that; then nothing changed."""
        self.check(places)
        named, often = np.unique(places, return_counts=True)
        left = self._owners[named] - often
        if len(left) and left.min() < 0:
            raise ValueError("a place is freed more often than it has owners")
        self._owners[named] = left
        gone: Numbers = named[left == 0]
        self._idle = grown(self._idle, self._idles + len(gone))
        self._idle[self._idles : self._idles + len(gone)] = gone
        self._idles += len(gone)
        self.used -= len(gone)
        if not self.used:
            self._forget()
        return gone


def grown(array: Array, rows: int) -> Array:
    """`array` with at least this many rows, itself if it has them; new ones are zeros. Rarely copies: it doubles."""
    if rows <= len(array):
        return array
    larger = np.zeros((max(rows, 2 * len(array), 1024), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def numbers(places: torch.Tensor) -> Numbers:
    """The places that a caller names. Raises ValueError unless they are [m] int64."""
    if places.dtype != torch.int64 or places.dim() != 1:
        raise ValueError(f"places are [m] int64, not {places.dtype} of shape {tuple(places.shape)}")
    found: Numbers = places.cpu().numpy()
    return found


def check_pages(payload: torch.Tensor, page_bytes: int) -> None:
    """Raises ValueError unless `payload` is [m, page_bytes] uint8."""
    if payload.dtype != torch.uint8 or payload.dim() != 2 or payload.shape[1] != page_bytes:
        raise ValueError(f"pages are [m, {page_bytes}] uint8, not {payload.dtype} of shape {tuple(payload.shape)}")
