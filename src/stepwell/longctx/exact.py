"""Attention over every page: equal to full attention up to rounding."""

from __future__ import annotations

import torch

from stepwell.longctx.asked import Asked
from stepwell.longctx.brought import Brought
from stepwell.longctx.layer import LayerState
from stepwell.longctx.merge import Part, merge
from stepwell.longctx.over import over_piece, over_pool


def everything(layer: LayerState, query: torch.Tensor, part: Part, asked: Asked) -> Part:
    """Every page: what the pool has of the very pages that were stored is not fetched again."""
    setting = layer.setting
    if layer.number == setting.first:
        setting.ledger.exact_passes += 1
    valid = layer.page_valid(asked.mask)
    wanted = torch.ones(query.shape[0], layer.pages, dtype=torch.bool, device=query.device)
    if layer.pool is not None and layer.source(exact=True) is layer.source(exact=False):
        resident = layer.pool.resident(layer.pages)
        part = merge(part, over_pool(layer, query, resident, valid, asked))
        wanted &= ~resident
    brought = Brought(
        layer.source(exact=True),
        wanted,
        layer.pages_at_once,
        fetcher=setting.fetcher,
        ledger=setting.ledger,
        kind="exact",
    )
    for piece in brought.pieces():
        part = merge(part, over_piece(layer, query, piece, valid, asked)[0])
    return part
