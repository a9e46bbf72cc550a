"""Attention over pages: those that the pool has, and those that were fetched."""

from __future__ import annotations

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.merge import PartialAttention, attend
from stepwell.longctx.kv.fetch.page_fetch import FetchedPiece, side_by_side
from stepwell.longctx.kv.layer import LayerState


def over_pool(
    layer: LayerState, query: torch.Tensor, pages: torch.Tensor, valid: torch.Tensor | None, asked: Asked
) -> PartialAttention:
    """Attention over those of `pages`, [L, n] bool, that are in the pool."""
    assert layer.pool is not None
    there = layer.pool.tokens_of(pages)
    if valid is not None:
        there = there & valid.gather(1, layer.pool.positions())
    return attend(
        query,
        layer.pool.keys,
        layer.pool.values,
        scale=asked.scale,
        softcap=asked.softcap,
        valid=there[:, None, None, None],
    )


def over_piece(
    layer: LayerState,
    query: torch.Tensor,
    piece: FetchedPiece,
    valid: torch.Tensor | None,
    asked: Asked,
    pages: torch.Tensor | None = None,
) -> tuple[PartialAttention, tuple[torch.Tensor, torch.Tensor]]:
    """Attention over the part of a fetched piece that is True in `pages`, [L, n] (None: all); and its states."""
    states = piece.states.result().states()
    count, tokens = query.shape[0], layer.shape.tokens
    (keys, there), (values, _) = (side_by_side(piece.lanes, each, count) for each in states)
    seen: torch.Tensor | None = None
    if valid is not None:
        seen = valid.unflatten(1, (-1, tokens))[piece.lanes, piece.pages]
    if pages is not None and not (chosen := pages[piece.lanes, piece.pages]).all():
        chosen = chosen[:, None].expand(-1, tokens)
        seen = chosen if seen is None else seen & chosen
    if seen is not None:
        beside, padded = side_by_side(piece.lanes, seen[:, None, :, None], count)
        there = beside[:, 0, :, 0] if padded is None else beside[:, 0, :, 0] & padded
    visible = None if there is None else there[:, None, None, None]
    return attend(query, keys, values, scale=asked.scale, softcap=asked.softcap, valid=visible), states
