"""Attention over every page: equal to full attention up to rounding."""

from __future__ import annotations

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.hot import hot_part
from stepwell.longctx.attention.merge import PartialAttention, merge
from stepwell.longctx.attention.over import over_piece, over_pool
from stepwell.longctx.kv.fetch.page_fetch import PageFetch
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.policy import AttentionMode


def everything(layer: LayerState, query: torch.Tensor, asked: Asked) -> PartialAttention:
    """Attention over sinks, tail and every page. Stored pages that the pool has unchanged are not fetched again; where
    reading is beside the model, the next layer's first pages are on their way while this layer computes (of an exact
    policy also the first layer's, for the next step)."""
    setting, ahead = layer.setting, layer.ahead
    if layer.number == setting.first:
        setting.ledger.exact_passes += 1
    pages, ahead.everything = ahead.everything, None
    if pages is None or pages.wanted.shape[1] != layer.pages:
        pages = _fetch(layer, urgent=True)
    following = _next_layer(layer)
    if (
        following is None and setting.policy.mode is AttentionMode.EXACT
    ):  # the next step is exact, too, and begins there
        following = layer.layers[setting.first]
    if setting.fetcher.beside and following is not None and following.pages:
        following.ahead.everything = _fetch(following, urgent=False)
    valid = layer.page_valid(asked.mask)
    part = hot_part(layer, query, asked)
    if layer.pool is not None and _pool_is_exact(layer):
        part = merge(part, over_pool(layer, query, ~pages.wanted, valid, asked))
    for piece in pages.pieces():
        part = merge(part, over_piece(layer, query, piece, valid, asked)[0])
    return part


def _next_layer(layer: LayerState) -> LayerState | None:
    """The next layer of the cache whose KV lies across tiers and that has begun; None behind the last."""
    later = [number for number in layer.layers if number > layer.number]
    return layer.layers[min(later)] if later else None


def _pool_is_exact(layer: LayerState) -> bool:
    return layer.source(exact=True) is layer.source(exact=False)


def _fetch(layer: LayerState, *, urgent: bool) -> PageFetch:
    """Fetches all pages but those that need no fetching. Nothing changes in the layer until its own attention."""
    source = layer.source(exact=True)
    wanted = torch.ones(source.lanes, layer.pages, dtype=torch.bool, device=layer.tail.keys.device)
    if layer.pool is not None and _pool_is_exact(layer):
        wanted &= ~layer.pool.resident(layer.pages)
    fetcher, ledger = layer.setting.fetcher, layer.setting.ledger
    return PageFetch(source, wanted, layer.pages_at_once, fetcher=fetcher, ledger=ledger, kind="exact", urgent=urgent)
