"""Attention of one layer across the tiers."""

from __future__ import annotations

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.hot import all_hot, by_lane, hot_part
from stepwell.longctx.attention.merge import PartialAttention, finish, merge, sink
from stepwell.longctx.attention.over import over_piece, over_pool
from stepwell.longctx.attention.sparse import selected_part
from stepwell.longctx.kv.fetch.page_fetch import PageFetch
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.writable import writable
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
    if following is None and setting.policy.mode is AttentionMode.EXACT:  # the next step begins there
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


@writable()
def attention(layer: LayerState, query: torch.Tensor, asked: Asked) -> torch.Tensor:
    """[B, query heads, Q, D] to [B, Q, query heads, Dv], in the query's dtype. The Q newest tokens of the layer are the
    query's own; each sees itself and what came before. Pages step down afterwards. Autocast does not reach in here."""
    with torch.autocast(query.device.type, enabled=False):
        return _attention(layer, query.to(layer.tail.keys.dtype), asked).to(query.dtype)


def _attention(layer: LayerState, query: torch.Tensor, asked: Asked) -> torch.Tensor:
    layer.scale = asked.scale
    steps = query.shape[2]
    if layer.sinks is None:
        output = all_hot(layer, query, asked)
        if steps > 1 or not layer.settled:
            layer.remember(layer.lanes.queries(query))
    else:
        lanes = layer.lanes.queries(query)
        sparse = steps == 1 and layer.setting.sparse_now
        if sparse:  # an exact pass has asked for pages already, of the copy and beside the pool that are there now
            layer.settle(asked.mask)
        layer.remember(lanes)
        part = selected_part(layer, lanes, asked) if sparse else everything(layer, lanes, asked)
        if asked.sinks is not None:
            part = merge(part, sink(by_lane(layer.lanes, layer.rows_count, asked.sinks), part))
        output = layer.lanes.outputs(finish(part)).to(query.dtype)
    layer.spill()
    return output
