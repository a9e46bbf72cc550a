"""Attention of one layer across the tiers."""

from __future__ import annotations

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.exact import everything
from stepwell.longctx.attention.hot import all_hot, by_lane
from stepwell.longctx.attention.merge import finish, merge, sink
from stepwell.longctx.attention.sparse import selected_part
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.writable import writable


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
