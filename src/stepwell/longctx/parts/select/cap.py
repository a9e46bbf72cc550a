"""A bound on what a step may fetch: OasisKV's bandwidth cap (arXiv 2608.08097)."""

from __future__ import annotations

import torch

from stepwell.longctx.parts.select.base import Selection
from stepwell.longctx.parts.select.choose import ordered


def cap(selection: Selection, resident: torch.Tensor, score: torch.Tensor, new_pages: int) -> Selection:
    """All selected pages that are resident ([L, n] bool), and of the others at most `new_pages` a lane: those with the
    greatest score ([L, n]; finite for selected pages)."""
    here = selection.valid & resident.gather(-1, selection.pages)
    absent = selection.valid & ~here
    rank = score.gather(-1, selection.pages).masked_fill(~absent, -torch.inf)
    top = rank.topk(min(new_pages, rank.shape[-1]), dim=-1, sorted=False)
    fetched = torch.zeros_like(here).scatter(-1, top.indices, top.values > -torch.inf)
    return ordered(selection.pages, here | fetched)
