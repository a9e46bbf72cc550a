"""Choice of the pages that a query needs, by a policy's index and selector."""

from __future__ import annotations

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.parts.select.base import Candidates, Selection


def candidates(
    layer: LayerState, query: torch.Tensor, hot_lse: torch.Tensor, valid: torch.Tensor | None, asked: Asked
) -> Candidates:
    """The selector's input for `query`, [L, H, G, D]."""
    always = None
    if asked.mask is not None:
        always = _first_tokens(layer, asked.mask)
    return layer.scored(query, hot_lse, scale=asked.scale, softcap=asked.softcap, valid=valid, always=always)


def _first_tokens(layer: LayerState, mask: torch.Tensor) -> torch.Tensor:
    """[L, n] bool: pages with the first real tokens of rows that begin with padding. They are sinks."""
    count = layer.setting.budget.sinks
    nth = mask.cumsum(1)
    first = mask & (nth <= count)
    tokens = layer.page_valid(first)
    assert tokens is not None
    return tokens.unflatten(1, (-1, layer.shape.tokens)).any(-1)


def scoring_query(layer: LayerState, actual: torch.Tensor) -> torch.Tensor:
    wish = layer.setting.policy.query
    if wish == "previous" and layer.before_query is not None:
        return layer.before_query
    if wish == "ahead" and layer.ahead.query is not None:
        return layer.ahead.query
    return actual


def resident_pages(layer: LayerState) -> torch.Tensor:
    if layer.pool is not None:
        return layer.pool.resident(layer.pages)
    lanes = layer.lanes.of_rows(layer.rows_count)
    return torch.zeros(lanes, layer.pages, dtype=torch.bool, device=layer.tail.keys.device)


def as_mask(selection: Selection, pages: int) -> torch.Tensor:
    """[L, pages] bool."""
    found = torch.zeros(len(selection.pages), pages + 1, dtype=torch.bool, device=selection.pages.device)
    return found.scatter_(1, torch.where(selection.valid, selection.pages, pages), True)[:, :pages]


def widen(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Widens `pages` to `count` pages: later ones are not in it."""
    return torch.nn.functional.pad(pages, (0, count - pages.shape[1]))
