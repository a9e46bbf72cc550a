"""Attention of one layer across the tiers: exact over all pages, or over what a policy selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from stepwell.longctx.brought import Brought, Piece, side_by_side
from stepwell.longctx.layer import LayerState
from stepwell.longctx.mass import estimate
from stepwell.longctx.merge import Part, attend, finish, merge, sink
from stepwell.longctx.parts.residency.base import Step
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.cap import cap
from stepwell.longctx.policy import Mode
from stepwell.longctx.pool import Change


@dataclass(frozen=True, slots=True)
class Asked:
    """What the model's attention asks of a layer. `mask`: [B, tokens] bool, False for padding; None: there is none.
    `sinks`: learned sink logits, one for each query head."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def attention(layer: LayerState, query: torch.Tensor, asked: Asked) -> torch.Tensor:
    """[B, query heads, Q, D] to [B, Q, query heads, Dv], in the query's dtype. The Q newest tokens of the layer are the
    query's own; each sees itself and what came before. Pages step down afterwards."""
    layer.scale = asked.scale
    steps = query.shape[2]
    if layer.sinks is None:
        output = _all_hot(layer, query, asked)
        if steps > 1 or not layer.settled:
            layer.remember(layer.lanes.queries(query))
    else:
        lanes = layer.lanes.queries(query)
        sparse = steps == 1 and layer.setting.policy.mode is not Mode.EXACT and not layer.setting.exact_now
        if steps == 1:
            layer.settle(asked.mask)
        layer.remember(lanes)
        hot = _hot(layer, lanes, asked)
        part = _selected(layer, lanes, hot, asked) if sparse else _everything(layer, lanes, hot, asked)
        if asked.sinks is not None:
            part = merge(part, sink(_by_lane(layer, asked.sinks), part))
        output = layer.lanes.outputs(finish(part)).to(query.dtype)
    layer.spill()
    return output


def _by_lane(layer: LayerState, sinks: torch.Tensor) -> torch.Tensor:
    """[query heads] to [L, H, G, 1]."""
    rows = layer.rows_count
    return layer.lanes.split(sinks.view(1, layer.lanes.kv_heads, -1, 1).expand(rows, -1, -1, -1))


# --- what is hot -----------------------------------------------------------------------------


def _all_hot(layer: LayerState, query: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Nothing is cold: attention as transformers' own."""
    keys, values = layer.tail.keys, layer.tail.values
    seen = _causal(query, keys.shape[2], asked.mask)
    if asked.softcap is None and asked.sinks is None:
        output = scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=seen,
            is_causal=seen is None and query.shape[2] > 1,
            scale=asked.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return output.transpose(1, 2).contiguous()
    if seen is None and query.shape[2] > 1:
        seen = _lower(query.shape[2], keys.shape[2], query.device)
    lanes = layer.lanes
    visible = None if seen is None else lanes.masks(seen.expand(query.shape[0], -1, -1, -1))[:, :, None]
    part = attend(
        lanes.queries(query),
        lanes.split(keys),
        lanes.split(values),
        scale=asked.scale,
        softcap=asked.softcap,
        valid=visible,
    )
    if asked.sinks is not None:
        part = merge(part, sink(_by_lane(layer, asked.sinks), part))
    return lanes.outputs(finish(part)).to(query.dtype)


def _causal(query: torch.Tensor, count: int, mask: torch.Tensor | None) -> torch.Tensor | None:
    """[B or 1, 1, Q, count] bool; None where SDPA's own rule is right: one query, or as many as keys, no padding."""
    steps = query.shape[2]
    if mask is None and steps in (1, count):
        return None
    seen = _lower(steps, count, query.device)
    if mask is None:
        return seen
    # A row of padding sees nothing, and softmax over nothing is NaN: it may see itself.
    own = torch.arange(count - steps, count, device=query.device)
    return (seen & mask[:, None, None, -count:]) | (own[:, None] == torch.arange(count, device=query.device))


def _lower(steps: int, count: int, device: torch.device) -> torch.Tensor:
    """[1, 1, steps, count]: the last `steps` of `count` tokens see themselves and what came before."""
    return torch.ones(steps, count, dtype=torch.bool, device=device).tril(count - steps)[None, None]


def _hot(layer: LayerState, query: torch.Tensor, asked: Asked) -> Part:
    """Sinks and tail, each query up to itself."""
    assert layer.sinks is not None
    lanes, tail = layer.lanes, layer.tail
    count = len(tail)
    seen = _lower(query.shape[3], count, query.device)[:, :, None] if query.shape[3] > 1 else None
    before = None
    if asked.mask is not None:
        padding = lanes.masks(asked.mask)[:, None, None, None]
        seen = padding[..., layer.before_tail :] if seen is None else seen & padding[..., layer.before_tail :]
        before = padding[..., : layer.sinks[0].shape[2]]
    kept = {"scale": asked.scale, "softcap": asked.softcap}
    part = attend(query, lanes.split(tail.keys), lanes.split(tail.values), valid=seen, **kept)
    if not layer.sinks[0].shape[2]:
        return part
    keys, values = (lanes.split(states) for states in layer.sinks)
    return merge(attend(query, keys, values, valid=before, **kept), part)


# --- exact -----------------------------------------------------------------------------------


def _everything(layer: LayerState, query: torch.Tensor, part: Part, asked: Asked) -> Part:
    """Every page: what the pool has of the very pages that were stored is not fetched again."""
    setting = layer.setting
    if layer.number == 0:
        setting.ledger.exact_passes += 1
    valid = layer.page_valid(asked.mask)
    wanted = torch.ones(query.shape[0], layer.pages, dtype=torch.bool, device=query.device)
    if layer.pool is not None and layer.source(exact=True) is layer.source(exact=False):
        resident = layer.pool.resident(layer.pages)
        part = merge(part, _pooled(layer, query, resident, valid, asked))
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
        part = merge(part, _over(layer, query, piece, valid, asked)[0])
    return part


def _pooled(
    layer: LayerState, query: torch.Tensor, pages: torch.Tensor, valid: torch.Tensor | None, asked: Asked
) -> Part:
    """Over those of `pages`, [L, n] bool, that are in the pool."""
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


def _over(
    layer: LayerState, query: torch.Tensor, piece: Piece, valid: torch.Tensor | None, asked: Asked
) -> tuple[Part, tuple[torch.Tensor, torch.Tensor]]:
    """Over a piece that was fetched; and its states."""
    states = piece.states.result()
    count = query.shape[0]
    (keys, there), (values, _) = (side_by_side(piece.lanes, each, count) for each in states)
    if valid is not None:
        seen = valid.unflatten(1, (-1, layer.shape.tokens))[piece.lanes, piece.pages]
        seen, padded = side_by_side(piece.lanes, seen[:, None, :, None], count)
        seen = seen[:, 0, :, 0]
        there = seen if padded is None else seen & padded
    visible = None if there is None else there[:, None, None, None]
    return attend(query, keys, values, scale=asked.scale, softcap=asked.softcap, valid=visible), states


# --- sparse ----------------------------------------------------------------------------------


def _selected(layer: LayerState, query: torch.Tensor, hot: Part, asked: Asked) -> Part:
    setting, policy, ledger = layer.setting, layer.setting.policy, layer.setting.ledger
    valid, actual = layer.page_valid(asked.mask), query[..., 0, :]
    shown = candidates(layer, _scoring_query(layer, actual), hot.lse[..., 0], valid, asked)
    assert policy.selector is not None
    selection = policy.selector.select(shown)
    resident = _resident(layer)
    if policy.new_pages is not None:
        selection = cap(selection, resident, shown.score, policy.new_pages)
    selected = as_mask(selection, layer.pages)
    brought, layer.ahead.brought = layer.ahead.brought, None
    early = _widen(brought.wanted, layer.pages) if brought is not None else torch.zeros_like(resident)
    missing = selected & ~resident & ~early
    ledger.steps += 1
    ledger.pages["selected"] += int(selected.sum())
    ledger.pages["hits"] += int((selected & resident).sum())
    ledger.pages["early"] += int((selected & early).sum())
    ledger.pages["mispredicted"] += int((early & ~selected).sum())
    late = _bring(layer, missing) if policy.executor == "fetch" else None
    part = hot
    pooled = resident if policy.attend_hot else resident & selected
    if layer.pool is not None:
        part = merge(part, _pooled(layer, query, pooled, valid, asked))
    change = _exchange(layer, selected, resident, shown.score)
    for fetched in (brought, late):
        if fetched is None:
            continue
        for piece in fetched.pieces():
            more, states = _over(layer, query, piece, valid, asked)
            part = merge(part, more)
            _install(layer, change, piece, states)
    if late is None:
        part = merge(part, _in_place(layer, query, missing, valid, asked, change))
    attended = pooled | selected | early
    _note(layer, shown, attended, actual, hot, valid, asked)
    layer.before_query = actual
    layer.ahead.query, layer.ahead.hot_lse = None, hot.lse[..., 0]
    layer.steps += 1
    return part


def foresee(layer: LayerState, query: torch.Tensor) -> None:
    """`query`: what the layer is expected to be asked next, [B, query heads, 1, D]. Pages that it would need are fetched
    from now on; where the policy says so, it is what selects."""
    policy, ahead = layer.setting.policy, layer.ahead
    foretold = layer.lanes.queries(query)[..., 0, :]
    if policy.query == "ahead":
        ahead.query = foretold
    if not policy.prefetch or ahead.hot_lse is None or ahead.brought is not None or policy.executor != "fetch":
        return
    assert policy.selector is not None
    shown = candidates(layer, foretold, ahead.hot_lse, None, Asked(layer.scale))
    resident = _resident(layer)
    selection = policy.selector.select(shown)
    if policy.new_pages is not None:
        selection = cap(selection, resident, shown.score, policy.new_pages)
    wanted = as_mask(selection, layer.pages) & ~resident
    ahead.brought = _bring(layer, wanted, urgent=False)


def candidates(
    layer: LayerState, query: torch.Tensor, hot_lse: torch.Tensor, valid: torch.Tensor | None, asked: Asked
) -> Candidates:
    """What the selector is shown for `query`, [L, H, G, D]."""
    assert layer.index is not None
    always = None
    if asked.mask is not None:
        always = _first_tokens(layer, asked.mask)
    return estimate(
        layer.index.score(query),
        hot_lse,
        granularity=layer.index.granularity,
        scale=asked.scale,
        softcap=asked.softcap,
        page_tokens=layer.shape.tokens,
        tokens=len(layer),
        valid=valid,
        always=always,
    )


def _first_tokens(layer: LayerState, mask: torch.Tensor) -> torch.Tensor:
    """[L, n] bool: pages with the first real tokens of rows that begin with padding. They are sinks."""
    count = layer.setting.budget.sinks
    nth = mask.cumsum(1)
    first = mask & (nth <= count)
    tokens = layer.page_valid(first)
    assert tokens is not None
    return tokens.unflatten(1, (-1, layer.shape.tokens)).any(-1)


def _scoring_query(layer: LayerState, actual: torch.Tensor) -> torch.Tensor:
    wish = layer.setting.policy.query
    if wish == "previous" and layer.before_query is not None:
        return layer.before_query
    if wish == "ahead" and layer.ahead.query is not None:
        return layer.ahead.query
    return actual


def _resident(layer: LayerState) -> torch.Tensor:
    if layer.pool is not None:
        return layer.pool.resident(layer.pages)
    lanes = layer.lanes.of_rows(layer.rows_count)
    return torch.zeros(lanes, layer.pages, dtype=torch.bool, device=layer.tail.keys.device)


def as_mask(selection: Selection, pages: int) -> torch.Tensor:
    """[L, pages] bool."""
    found = torch.zeros(len(selection.pages), pages + 1, dtype=torch.bool, device=selection.pages.device)
    return found.scatter_(1, torch.where(selection.valid, selection.pages, pages), True)[:, :pages]


def _widen(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Pages that have stepped down since this was asked for are not among it."""
    return torch.nn.functional.pad(pages, (0, count - pages.shape[1]))


def _bring(layer: LayerState, wanted: torch.Tensor, *, urgent: bool = True) -> Brought:
    setting = layer.setting
    found = Brought(
        layer.source(exact=False),
        wanted,
        layer.pages_at_once,
        fetcher=setting.fetcher,
        ledger=setting.ledger,
        kind="draft",
        urgent=urgent,
    )
    setting.ledger.pages["fetched"] += found.count
    return found


def _exchange(layer: LayerState, selected: torch.Tensor, resident: torch.Tensor, score: torch.Tensor) -> Change | None:
    """Who is in the pool from now on. New pages come in as they are fetched."""
    if layer.pool is None or layer.residency is None:
        return None
    rank = layer.residency.rank(Step(layer.steps, selected, score, resident))
    rank = rank.masked_fill(~(selected | resident), -torch.inf)
    return layer.pool.exchange(layer.keep(rank))


def _install(
    layer: LayerState, change: Change | None, piece: Piece, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Those of the piece's pages that have got a slot."""
    if change is None or not len(change.lanes):
        return
    assert layer.pool is not None
    position = torch.full((int(layer.pool.pages.shape[0]), layer.pages), -1, device=piece.lanes.device)
    position[piece.lanes, piece.pages] = torch.arange(len(piece.lanes), device=piece.lanes.device)
    of = position[change.lanes, change.pages]
    here = of >= 0
    keys, values = (each[of[here]] for each in states)
    layer.pool.install(change.lanes[here], change.slots[here], keys, values)


def _in_place(
    layer: LayerState,
    query: torch.Tensor,
    wanted: torch.Tensor,
    valid: torch.Tensor | None,
    asked: Asked,
    change: Change | None,
) -> Part:
    """Over `wanted` where it lies: on the CPU, which hands over partial results only; and pages that are to stay."""
    setting, source = layer.setting, layer.source(exact=False)
    setting.ledger.pages["in_place"] += int(wanted.sum())
    asking = query
    if setting.policy.predicted_math and layer.ahead.query is not None:
        asking = layer.ahead.query[..., None, :]
    there = asking.cpu()
    seen = None if valid is None else valid.cpu()
    part: Part | None = None
    lanes, pages = wanted.nonzero(as_tuple=True)
    for some in zip(lanes.cpu().split(layer.pages_at_once), pages.cpu().split(layer.pages_at_once), strict=True):
        of_lanes, of_pages = some
        states = setting.fetcher.start(lambda at=some: source.read(*at))
        more, read = _over(layer, there, Piece(of_lanes, of_pages, states), seen, asked)
        part = more if part is None else merge(part, more)
        _install(layer, change, Piece(of_lanes, of_pages, states), read)
    if change is not None:
        setting.ledger.moved("cold", "hot", "recall", len(change.lanes) * source.codec.page_bytes)
    if part is None:
        lanes_count, heads, group, steps = query.shape[:4]
        none = query.new_empty(lanes_count, heads, 0, layer.shape.key_dim)
        part = attend(there, none.cpu(), none.new_empty(*none.shape[:3], layer.shape.value_dim).cpu(), scale=1.0)
    crossed = asking.nbytes + part.output.nbytes + part.peak.nbytes + part.total.nbytes
    setting.ledger.moved("cold", "hot", "partial", crossed)
    device = query.device
    return Part(part.output.to(device), part.peak.to(device), part.total.to(device))


# --- what was left out -----------------------------------------------------------------------


def _note(
    layer: LayerState,
    shown: Candidates,
    attended: torch.Tensor,
    query: torch.Tensor,
    hot: Part,
    valid: torch.Tensor | None,
    asked: Asked,
) -> None:
    ledger = layer.setting.ledger
    ledger.uncovered(_left_out(shown.mass, attended), layer.setting.policy.alarm)
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
