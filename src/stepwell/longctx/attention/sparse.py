"""Attention over what a policy selects, fetched or where it lies."""

from __future__ import annotations

import logging
from functools import partial

import torch

from stepwell.longctx.attention.asked import Asked
from stepwell.longctx.attention.hot import hot_part
from stepwell.longctx.attention.merge import PartialAttention, attend, merge
from stepwell.longctx.attention.over import over_piece, over_pool
from stepwell.longctx.kv.fetch.arrival import arrive
from stepwell.longctx.kv.fetch.page_fetch import FetchedPiece, PageFetch
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.pool import Change
from stepwell.longctx.parts.residency.base import DecodeStep
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import cap
from stepwell.longctx.parts.select.mass import estimate
from stepwell.longctx.policy import AttentionMode, Policy


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


_log = logging.getLogger("stepwell.longctx")
_EARLY = 4
"""Pages of a lane in a piece that is fetched early: an urgent fetch waits for no more than one piece."""


def selected_part(layer: LayerState, query: torch.Tensor, asked: Asked) -> PartialAttention:
    """Attention over sinks, tail, the pages in the pool and those selected; then updates the pool."""
    policy, ledger = layer.setting.policy, layer.setting.ledger
    valid, actual, hot = layer.page_valid(asked.mask), query[..., 0, :], hot_part(layer, query, asked)
    shown = candidates(layer, scoring_query(layer, actual), hot.lse[..., 0], valid, asked)
    resident = resident_pages(layer)
    fetches, layer.ahead.fetches, layer.ahead.everything = layer.ahead.fetches, [], None
    early = _under_way(fetches, resident)
    selection = _select(policy, shown, resident, early)
    selected = as_mask(selection, layer.pages)
    if layer.setting.profile is not None and layer.pool is not None:
        layer.setting.profile.note(layer.number, selected)
    missing = selected & ~resident & ~early
    ledger.pages["selected"] += int(selected.sum())
    ledger.pages["hits"] += int((selected & resident).sum())
    ledger.pages["early"] += int((selected & early).sum())
    ledger.pages["mispredicted"] += int((early & ~selected).sum())
    later: torch.Tensor | None = None
    if policy.late_mass is not None and layer.setting.late_pages and not layer.ahead.lost:
        waited = missing & (shown.mass.amax((1, 2)) > policy.late_mass)
        missing, later = waited, missing & ~waited
        selected &= ~later
        ledger.pages["late"] += int(later.sum())
        later &= as_mask(cap(selection, ~later, shown.score, layer.setting.late_pages), layer.pages)
    layer.setting.approximate |= policy.mode is AttentionMode.SPARSE
    ledger.steps += 1
    late = _fetch(layer, missing) if policy.executor != "in_place" else None
    part = hot
    # Resident pages are attended over, selected or not, or only those that were selected.
    there = resident | early if policy.attend_hot else (resident | early) & selected
    if layer.pool is not None:
        part = merge(part, over_pool(layer, query, there, valid, asked))
    change = _exchange(layer, selected | early, resident, shown.score)
    for fetched in (*fetches, *([late] if late is not None else [])):
        for piece in fetched.pieces():
            more, states = over_piece(layer, query, piece, valid, asked, pages=there | missing)
            part = merge(part, more)
            _install(layer, change, piece, states)
    if late is None:
        part = merge(part, _in_place(layer, query, missing, valid, asked, change))
    _note(layer, shown, there | selected, actual, hot, valid, asked)
    if later is not None:
        layer.ahead.fetches.append(_fetch(layer, later, urgent=False))
    layer.before_query = actual
    layer.ahead.query, layer.ahead.hot_lse, layer.ahead.lost = None, hot.lse[..., 0], False
    layer.steps += 1
    return part


def predict(layer: LayerState, query: torch.Tensor) -> None:
    """Prepares the layer's next step. `query`: its expected query, [B, query heads, 1, D]. Pages that it would need are
    fetched from now on; if the policy asks for it, it also selects."""
    policy, ahead = layer.setting.policy, layer.ahead
    predicted = layer.lanes.queries(query)[..., 0, :]
    if policy.query == "ahead":
        ahead.query = predicted
    beside = layer.setting.fetcher.beside  # else nothing would be early: reading is done where it is asked for
    if not (policy.prefetch and beside) or ahead.hot_lse is None:
        return
    shown = candidates(layer, predicted, ahead.hot_lse, None, Asked(layer.scale))
    resident = resident_pages(layer)
    early = _under_way(ahead.fetches, resident)
    wanted = as_mask(_select(policy, shown, resident, early), layer.pages) & ~resident & ~early
    ahead.fetches.append(_fetch(layer, wanted, urgent=False))


def _select(policy: Policy, shown: Candidates, resident: torch.Tensor, early: torch.Tensor) -> Selection:
    """The policy's selection; of pages that are neither resident nor on their way ([L, n] bool each), no more than the
    policy allows as new in a step."""
    assert policy.selector is not None
    selection = policy.selector.select(shown)
    if policy.new_pages is None:
        return selection
    left = max(policy.new_pages - int(early.sum(1).max()), 0)
    return cap(selection, resident | early, shown.score, left)


def _under_way(fetches: list[PageFetch], resident: torch.Tensor) -> torch.Tensor:
    """[L, n] bool: pages that are on their way."""
    found = torch.zeros_like(resident)
    for each in fetches:
        found |= widen(each.wanted, resident.shape[1])
    return found


def _fetch(layer: LayerState, wanted: torch.Tensor, *, urgent: bool = True) -> PageFetch:
    """Fetches as many pages at once as may be in memory at a time; early ones in small pieces."""
    setting, most = layer.setting, layer.pages_at_once
    each = most if urgent else min(_EARLY * wanted.shape[0], most)
    found = PageFetch(
        layer.source(exact=False),
        wanted,
        each,
        fetcher=setting.fetcher,
        ledger=setting.ledger,
        kind="draft",
        urgent=urgent,
        begin=most // each,
    )
    setting.ledger.pages["fetched"] += found.count
    return found


def _exchange(layer: LayerState, attended: torch.Tensor, resident: torch.Tensor, score: torch.Tensor) -> Change | None:
    """Decides which pages are in the pool from now on. New ones enter as they are fetched."""
    if layer.pool is None or layer.residency is None:
        return None
    rank = layer.residency.rank(DecodeStep(layer.steps, attended, score, resident))
    rank = rank.masked_fill(~(attended | resident), -torch.inf)
    return layer.pool.exchange(layer.keep(rank))


def _install(
    layer: LayerState, change: Change | None, piece: FetchedPiece, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Puts the pages of a piece that have got a slot into the pool."""
    if change is None or not len(change.lanes):
        return
    assert layer.pool is not None
    device = layer.pool.keys.device  # the piece may lie elsewhere
    position = torch.full((int(layer.pool.pages.shape[0]), layer.pages), -1, device=device)
    position[piece.lanes, piece.pages] = torch.arange(len(piece.lanes), device=device)
    of = position[change.lanes, change.pages]
    here = of >= 0
    keys, values = (each[of[here].to(each.device)].to(device) for each in states)
    layer.pool.install(change.only(here), keys, values)


def _in_place(
    layer: LayerState,
    query: torch.Tensor,
    wanted: torch.Tensor,
    valid: torch.Tensor | None,
    asked: Asked,
    change: Change | None,
) -> PartialAttention:
    """Attention over `wanted` where it lies, on the CPU, which returns partial results only; and the pages that are to
    stay."""
    setting, source = layer.setting, layer.source(exact=False)
    setting.ledger.pages["in_place"] += int(wanted.sum())
    asking = query
    if setting.policy.predicted_math and layer.ahead.query is not None:
        asking = layer.ahead.query[..., None, :]
    there = asking.cpu()
    seen = None if valid is None else valid.cpu()
    part: PartialAttention | None = None
    lanes, pages = wanted.nonzero(as_tuple=True)
    for of_lanes, of_pages in zip(
        lanes.cpu().split(layer.pages_at_once), pages.cpu().split(layer.pages_at_once), strict=True
    ):
        states = setting.fetcher.start(partial(arrive, source, of_lanes, of_pages, there.device))
        more, read = over_piece(layer, there, FetchedPiece(of_lanes, of_pages, states), seen, asked)
        part = more if part is None else merge(part, more)
        _install(layer, change, FetchedPiece(of_lanes, of_pages, states), read)
    if change is not None:
        setting.ledger.moved("cold", "hot", "recall", len(change.lanes) * source.codec.page_bytes)
    if part is None:
        none = there.new_empty(*there.shape[:2], 0, layer.shape.key_dim)
        part = attend(there, none, none.new_empty(*none.shape[:3], layer.shape.value_dim), scale=1.0)
    crossed = asking.nbytes + part.output.nbytes + part.peak.nbytes + part.total.nbytes
    setting.ledger.moved("cold", "hot", "partial", crossed)
    device = query.device
    return PartialAttention(part.output.to(device), part.peak.to(device), part.total.to(device))


def _note(
    layer: LayerState,
    shown: Candidates,
    attended: torch.Tensor,
    query: torch.Tensor,
    hot: PartialAttention,
    valid: torch.Tensor | None,
    asked: Asked,
) -> None:
    ledger, alarm = layer.setting.ledger, layer.setting.policy.alarm
    if ledger.uncovered(_left_out(shown.mass, attended), alarm) and ledger.alarms == 1:
        _log.warning(
            "accuracy is at risk: policy %s leaves out more than %.0f %% of attention, as it estimates itself; give it "
            "more hot tokens or a greater share, or use an exact or verified policy",
            layer.setting.policy.name,
            100 * alarm,
        )
    if layer.truth is None:
        return
    truly = estimate(
        layer.truth.score(query),
        hot.lse[..., 0],
        granularity="token",
        scale=asked.scale,
        softcap=asked.softcap,
        page_tokens=layer.shape.tokens,
        tokens=len(layer),
        valid=valid,
    )
    ledger.true_uncovered_sum += _left_out(truly.mass, attended)
    ledger.audited += 1


def _left_out(mass: torch.Tensor, attended: torch.Tensor) -> float:
    """The share of attention on pages that were not attended over, averaged over heads and lanes."""
    return float((mass * ~attended[:, None, None]).sum(-1).mean())
