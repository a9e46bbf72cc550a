"""History of a layer's pages, and common parts of residencies."""

from __future__ import annotations

import torch

from stepwell.longctx.parts.residency.base import DecodeStep


def staying(rank: torch.Tensor, step: DecodeStep) -> torch.Tensor:
    """The rank, -inf for pages that are neither resident nor were selected just now."""
    return rank.masked_fill(~(step.resident | step.selected), -torch.inf)


def page_numbers(like: torch.Tensor) -> torch.Tensor:
    """[n] float32 for [L, n]: exact up to 2^24 pages."""
    return torch.arange(like.shape[-1], dtype=torch.float32, device=like.device)


def grown(known: torch.Tensor | None, like: torch.Tensor, fill: float) -> torch.Tensor:
    """`known` [L, m] float32, filled up to the width of `like` [L, n] for pages that have come since."""
    if known is None:
        return torch.full(like.shape, fill, dtype=torch.float32, device=like.device)
    return torch.nn.functional.pad(known, (0, like.shape[-1] - known.shape[-1]), value=fill)


class Stateless:
    """Base of residencies without history."""

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        return importance

    def crop(self, pages: int) -> None:
        pass

    def rows(self, lanes: torch.Tensor) -> None:
        pass


class Uses:
    """The step in which each page was last selected. A page's arrival counts as a use in the step before, and so does
    `warm`."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # [L, n]
        self._now = -1

    def note(self, step: DecodeStep) -> torch.Tensor:
        """[L, n] float32: how many steps ago, 0 for those selected just now."""
        self._now = step.number
        self._last = grown(self._last, step.selected, step.number - 1).masked_fill(step.selected, step.number)
        return step.number - self._last

    def warm(self, importance: torch.Tensor) -> torch.Tensor:
        self._last = torch.full_like(importance, self._now)
        return importance

    def crop(self, pages: int) -> None:
        if self._last is not None:
            self._last = self._last[:, :pages]

    def rows(self, lanes: torch.Tensor) -> None:
        if self._last is not None:
            self._last = self._last.index_select(0, lanes)
