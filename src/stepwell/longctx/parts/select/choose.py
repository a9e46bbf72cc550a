"""From marks or ranks to a `Selection`, in which pages are in order, and a bound on what a step may fetch."""

from __future__ import annotations

import torch

from stepwell.longctx.parts.select.base import Selection


def cap(selection: Selection, resident: torch.Tensor, score: torch.Tensor, new_pages: int) -> Selection:
    """All selected pages that are resident ([L, n] bool), and of the others at most `new_pages` a lane: those with the
    greatest score ([L, n]; finite for selected pages). OasisKV's bandwidth cap (arXiv 2608.08097)."""
    here = selection.valid & resident.gather(-1, selection.pages)
    absent = selection.valid & ~here
    rank = score.gather(-1, selection.pages).masked_fill(~absent, -torch.inf)
    top = rank.topk(min(new_pages, rank.shape[-1]), dim=-1, sorted=False)
    fetched = torch.zeros_like(here).scatter(-1, top.indices, top.values > -torch.inf)
    return ordered(selection.pages, here | fetched)


_BEYOND = torch.iinfo(torch.int64).max


def best(rank: torch.Tensor, count: int) -> Selection:
    """The `count` pages of the highest rank in each lane ([L, n]); -inf is not selected. Which of equal pages at the
    margin is open."""
    top = rank.topk(min(count, rank.shape[-1]), dim=-1, sorted=False)
    return ordered(top.indices, top.values > -torch.inf)


def marked(marks: torch.Tensor) -> Selection:
    """[L, n] bool."""
    return ordered(torch.arange(marks.shape[-1], device=marks.device).expand_as(marks), marks)


def ordered(pages: torch.Tensor, keep: torch.Tensor) -> Selection:
    """The page numbers [L, K] marked in `keep`, ascending; as wide as the widest lane."""
    ascending = torch.where(keep, pages, _BEYOND).sort(-1).values
    width = int(keep.sum(-1).max())
    ascending = ascending[:, :width]
    valid = ascending != _BEYOND
    return Selection(torch.where(valid, ascending, 0), valid)
