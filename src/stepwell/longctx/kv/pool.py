"""Pages that have stepped down and have a copy on the model's device: a fixed number of slots for each lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.shape import PageShape

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Change:
    """Pages that enter the pool, each with its slot, [e] each, by lane and in ascending order of page."""

    lanes: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor

    def only(self, some: torch.Tensor | slice) -> Change:
        """The selected pairs alone."""
        return Change(self.lanes[some], self.pages[some], self.slots[some])


class PagePool:
    """Pool of pages on the model's device. `keys` and `values`: [L, H, C * P, D] in the model's dtype."""

    def __init__(self, shape: PageShape, lanes: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self.slots = slots
        self.keys = torch.zeros(lanes, shape.heads, slots * shape.tokens, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(lanes, shape.heads, slots * shape.tokens, shape.value_dim, dtype=dtype, device=device)
        self._page_of = torch.full((lanes, slots), _NOBODY, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self._page_of.nbytes

    @property
    def pages(self) -> torch.Tensor:
        """[L, C] int64: which page is in a slot, -1 for none."""
        return self._page_of

    def resident(self, count: int) -> torch.Tensor:
        """[L, count] bool, of the pages numbered so far."""
        found = torch.zeros(self._page_of.shape[0], count + 1, dtype=torch.bool, device=self._page_of.device)
        # Free slots point behind the last page, and are cut off.
        found.scatter_(1, torch.where(self._page_of == _NOBODY, count, self._page_of), True)
        return found[:, :count]

    def tokens_of(self, pages: torch.Tensor) -> torch.Tensor:
        """[L, C * P] bool: the tokens in the pool that belong to pages that are True in `pages`, [L, n]."""
        chosen = (self._page_of != _NOBODY) & pages.gather(1, self._page_of.clamp_min(0))
        return chosen.repeat_interleave(self._shape.tokens, 1)

    def positions(self) -> torch.Tensor:
        """[L, C * P]: of each token, counted from the first page's first; meaningless in empty slots."""
        first = self._page_of.clamp_min(0) * self._shape.tokens
        return (first[..., None] + torch.arange(self._shape.tokens, device=first.device)).flatten(1)

    def exchange(self, keep: torch.Tensor) -> Change:
        """Removes all pages that are not in `keep`, [L, n] bool with at most `slots` in a lane, and assigns slots to
        the pages of it that are missing. Each of these is resident once `install` has put it in."""
        held = self._page_of
        staying = (held != _NOBODY) & keep.gather(1, held.clamp_min(0))
        self._page_of = torch.where(staying, held, _NOBODY)
        entering = keep & ~self.resident(keep.shape[1])
        lanes, pages = entering.nonzero(as_tuple=True)
        if not len(lanes):
            return Change(lanes, pages, pages)
        counts = entering.sum(1)
        nth = torch.arange(len(lanes), device=lanes.device) - (counts.cumsum(0) - counts)[lanes]
        empty_first = staying.to(torch.uint8).argsort(dim=1, stable=True)
        return Change(lanes, pages, empty_first[lanes, nth])

    def install(self, change: Change, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts the pages that `exchange` has given slots to into them, [e, H, P, D]; before it is called again."""
        tokens = self._shape.tokens
        of_keys = self.keys.unflatten(2, (self.slots, tokens))
        of_values = self.values.unflatten(2, (self.slots, tokens))
        of_keys[change.lanes, :, change.slots] = keys
        of_values[change.lanes, :, change.slots] = values
        self._page_of[change.lanes, change.slots] = change.pages

    def resize(self, slots: int) -> None:
        """Changes the number of slots; pages in slots that are removed are forgotten."""
        kept, tokens = min(slots, self.slots), self._shape.tokens
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], slots * tokens, old.shape[3])
            new[:, :, : kept * tokens] = old[:, :, : kept * tokens]
            setattr(self, name, new)
        pages = self._page_of.new_full((len(self._page_of), slots), _NOBODY)
        pages[:, :kept] = self._page_of[:, :kept]
        self._page_of, self.slots = pages, slots

    def crop(self, pages: int) -> None:
        """Forgets all but the first `pages`."""
        self._page_of = torch.where(self._page_of < pages, self._page_of, _NOBODY)

    def rows(self, lanes: torch.Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, lanes), self.values.index_select(0, lanes)
        self._page_of = self._page_of.index_select(0, lanes)
