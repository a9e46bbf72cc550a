"""The KV of one layer across the tiers: sinks, pages that have stepped down, and the recent tail.

    | sinks | page 0 | page 1 | ... | page n - 1 | tail ... |
      hot     cold, some with a copy in the pool     hot

Up to the hot budget everything is tail and nothing else exists. Pages step down after the attention that they took part
in, and never change from then on.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import torch

from stepwell.errors import StepwellError
from stepwell.longctx.kv.cold import ColdPages
from stepwell.longctx.kv.fetch.page_fetch import PageFetch
from stepwell.longctx.kv.lanes import Lanes
from stepwell.longctx.kv.pool import PagePool
from stepwell.longctx.kv.setting import CacheSetting
from stepwell.longctx.kv.tail import Tail
from stepwell.longctx.near.keys import NearKeys
from stepwell.longctx.parts.codec.plain import Plain
from stepwell.longctx.parts.index.base import KeyIndex
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.residency.base import Residency
from stepwell.longctx.parts.select.base import Candidates
from stepwell.longctx.parts.select.mass import estimate
from stepwell.longctx.policy import AttentionMode
from stepwell.longctx.shape import PageShape

_LAST_QUERIES = 16
"""Last tokens of the prompt, whose attention shows which pages are important when decoding begins (as in SnapKV)."""
_READ_NUMBERS = 1 << 23
"""K and V numbers that are decoded at a time: 32 MiB in float32."""


@dataclass(slots=True)
class Ahead:
    """Preparations of the layer before for the next step: the expected query, pages that are being fetched for it, or,
    before an exact pass, all of them. `lost`: the rows have changed since, so fetched pages do not fit them; the next
    step then puts off no page, since with beams, which change in each step, it would never arrive."""

    query: torch.Tensor | None = None
    hot_lse: torch.Tensor | None = None
    fetches: list[PageFetch] = field(default_factory=list)
    everything: PageFetch | None = None
    lost: bool = False


class LayerState:
    """State of one layer, made with its first keys and values, [B, KV heads, n, D]. `number`: its number in the model.
    `layers`: the states of one cache by that number, to which it adds itself."""

    def __init__(
        self, setting: CacheSetting, layers: dict[int, LayerState], number: int,
        keys: torch.Tensor, values: torch.Tensor, group: int,
    ) -> None:  # fmt: skip
        self.setting, self.number, self.layers = setting, number, layers
        layers[number] = self
        policy = setting.policy
        self.lanes = Lanes(keys.shape[1], policy.joint)
        self.shape = PageShape(self.lanes.heads, group, policy.page_tokens, keys.shape[-1], values.shape[-1])
        self.tail = Tail(keys, values)
        self.sinks: tuple[torch.Tensor, torch.Tensor] | None = None
        self.exact: ColdPages | None = None
        self.draft: ColdPages | None = None
        self.index: KeyIndex | NearKeys | None = None
        self.truth: KeyIndex | None = None
        self.residency: Residency | None = None
        self.pool: PagePool | None = None
        self.settled = self.warmed = False
        self.last_queries: torch.Tensor | None = None
        self.scale = 1.0
        """Scale of logits in the model's attention; set with each attention."""
        self.steps = 0
        """Number of decode steps so far."""
        self.before_query: torch.Tensor | None = None
        """Query of the step before, [L, H, G, D]."""
        self.ahead = Ahead()

    # --- what is where -----------------------------------------------------------------------

    @property
    def rows_count(self) -> int:
        return int(self.tail.keys.shape[0])

    @property
    def pages(self) -> int:
        """Number of pages that have stepped down."""
        copy = self.exact or self.draft
        return copy.count if copy is not None else 0

    @property
    def before_tail(self) -> int:
        """Tokens in sinks and pages."""
        return (self.sinks[0].shape[2] if self.sinks is not None else 0) + self.pages * self.shape.tokens

    def __len__(self) -> int:
        return self.before_tail + len(self.tail)

    @property
    def hot_bytes(self) -> int:
        """Bytes of sinks, tail, pool, and pages that are being fetched."""
        held = self.tail.nbytes + (self.pool.nbytes if self.pool is not None else 0)
        held += sum(states.nbytes for states in self.sinks) if self.sinks is not None else 0
        coming = sum(fetch.count for fetch in self.ahead.fetches)
        return held + coming * self.shape.numbers * self.tail.keys.element_size()

    @property
    def index_bytes(self) -> int:
        return self.index.nbytes if self.index is not None else 0

    @property
    def pages_at_once(self) -> int:
        """Most pages that are decoded into memory at a time, in all lanes together."""
        return max(1, _READ_NUMBERS // self.shape.numbers)

    def source(self, exact: bool) -> ColdPages:
        """The copy to read from."""
        found = (self.exact or self.draft) if exact else (self.draft or self.exact)
        assert found is not None
        return found

    def page_valid(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[L, n * P] bool: which tokens of the pages are not padding; None: all. `mask`: [B, tokens] bool."""
        if mask is None or not self.pages:
            return None
        first = self.before_tail - self.pages * self.shape.tokens
        return self.lanes.masks(mask[:, first : self.before_tail])

    # --- stepping down -----------------------------------------------------------------------

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.tail.append(keys, values)

    def remember(self, query: torch.Tensor) -> None:
        """Keeps the last queries of a prompt, however it is divided, if a pool will be filled by them; `query`: [L, H,
        G, Q, D]."""
        if self.settled or self.setting.policy.residency is None:
            return
        last = query[..., -_LAST_QUERIES:, :].detach()
        before = self.last_queries
        self.last_queries = (
            torch.cat([before, last], -2)[..., -_LAST_QUERIES:, :] if before is not None else last.clone()
        )

    def spill(self) -> None:
        """Lets pages step down if the hot budget is used up. Raises CapacityError; the cache is of no use then."""
        budget = self.setting.budget
        if self.sinks is None:
            if len(self.tail) <= budget.total:
                return
            count = budget.to_spill(len(self.tail) - budget.sinks, self.shape.tokens)
            if count:
                self._step_down(count, skip=budget.sinks)
        elif count := budget.to_spill(len(self.tail), self.shape.tokens):
            self._step_down(count, skip=0)

    def _step_down(self, count: int, skip: int) -> None:
        tokens = count * self.shape.tokens
        keys = self.lanes.split(self.tail.keys[:, :, skip : skip + tokens])
        values = self.lanes.split(self.tail.values[:, :, skip : skip + tokens])
        if self.exact is None and self.draft is None:
            self._open(keys)
        first = not self.pages
        self._store(_pages(keys, self.shape.tokens), _pages(values, self.shape.tokens))
        for index in (self.index, self.truth):
            if index is not None:
                index.add(keys)
        if first:
            self.sinks = self.tail.keys[:, :, :skip].clone(), self.tail.values[:, :, :skip].clone()
        if not self.settled:
            self.warmed = first and self._warm(keys, values)
        self.tail.drop_front(skip + tokens, self.setting.budget.window + self.setting.budget.slack)

    def _open(self, keys: torch.Tensor) -> None:
        policy, lanes = self.setting.policy, keys.shape[0]
        lossy = policy.codec is not None
        if policy.mode is not AttentionMode.SPARSE or not lossy or not self.settled:
            self.exact = self._copy(None)
        if lossy and (policy.mode is AttentionMode.VERIFIED or self.settled):
            self.draft = self._copy(policy.codec)
        if policy.index is not None and policy.mode is not AttentionMode.EXACT:
            near = self.setting.near
            if near is None:
                self.index = policy.index.build(self.shape)
            else:
                self.index = NearKeys(near, self.setting.ledger, self.number, policy.index, self.shape)
        if self.setting.audit:
            self.truth = TrueKeys().build(self.shape)
        if policy.residency is not None and self.setting.budget.pool:
            self.residency = policy.residency.build(self.shape)
            self.pool = PagePool(self.shape, lanes, self.setting.slots, keys.dtype, keys.device)

    def _copy(self, codec: object) -> ColdPages:
        kind = Plain() if codec is None else self.setting.policy.codec
        assert kind is not None
        made = kind.build(self.shape, self.tail.keys.dtype)
        lanes = self.lanes.of_rows(self.rows_count)
        store = self.setting.store_for(made.page_bytes)
        return ColdPages(made, store, lanes, device=self.tail.keys.device, fetcher=self.setting.fetcher)

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores pages in all copies, or, if one has no room, in none."""
        before = self.pages
        for start in range(0, keys.shape[1], max(1, self.pages_at_once // keys.shape[0])):
            end = min(start + max(1, self.pages_at_once // keys.shape[0]), keys.shape[1])
            for copy in (self.exact, self.draft):
                if copy is None:
                    continue
                try:
                    nbytes = copy.add(keys[:, start:end], values[:, start:end])
                except BaseException:
                    for other in (self.exact, self.draft):
                        if other is not None:
                            with suppress(StepwellError):
                                other.crop(before)
                    raise
                self.setting.ledger.moved("hot", "cold", "spill", nbytes)

    def _warm(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Fills the pool with pages that are about to leave, by the attention of the prompt's last tokens."""
        if self.pool is None or self.residency is None or self.last_queries is None:
            return False
        logits = (self.last_queries.flatten(2, 3).float() @ keys.float().transpose(-1, -2)) * self.scale
        mass = logits.softmax(-1).unflatten(-1, (-1, self.shape.tokens)).sum(-1)
        change = self.pool.exchange(self.keep(self.residency.warm(mass.amax(2).sum(1))))
        pages = _pages(keys, self.shape.tokens), _pages(values, self.shape.tokens)
        of = [states[change.lanes, change.pages] for states in pages]
        self.pool.install(change, *of)
        return True

    def keep(self, rank: torch.Tensor) -> torch.Tensor:
        """[L, n] bool: the best of each lane that fit into the pool."""
        assert self.pool is not None
        keep = torch.zeros_like(rank, dtype=torch.bool)
        best = rank.topk(min(self.pool.slots, rank.shape[1]), dim=1)
        return keep.scatter_(1, best.indices, best.values > -torch.inf)

    # --- when decoding begins ----------------------------------------------------------------

    def settle(self, mask: torch.Tensor | None) -> None:
        """Ends prefill: pages lie in the policy's codec from here on, and the pool has what the prompt cared for."""
        if self.settled:
            return
        self.settled = True
        policy = self.setting.policy
        if not self.pages or policy.mode is AttentionMode.EXACT:
            return
        if policy.mode is AttentionMode.SPARSE and policy.codec is not None and self.exact is not None:
            self._transcode()
        if not self.warmed:
            self._warm_by_index(mask)
        self.last_queries = None

    def _transcode(self) -> None:
        assert self.exact is not None
        lanes, count = self.lanes.of_rows(self.rows_count), self.pages
        draft = self._copy(self.setting.policy.codec)
        step = max(1, self.pages_at_once // lanes)
        try:
            for start in range(0, count, step):
                some = torch.arange(start, min(start + step, count))
                states = self.exact.read(torch.arange(lanes).repeat_interleave(len(some)), some.repeat(lanes))
                draft.add(*(each.unflatten(0, (lanes, len(some))) for each in states))
        except BaseException:
            draft.release()
            raise
        self.exact.release()
        self.exact, self.draft = None, draft
        self.setting.approximate |= not draft.codec.lossless

    def _warm_by_index(self, mask: torch.Tensor | None) -> None:
        if self.pool is None or self.residency is None or self.index is None or self.last_queries is None:
            return
        queries = self.last_queries.flatten(2, 3)
        nothing = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
        valid = self.page_valid(mask)
        shown = self.scored(queries, nothing, scale=self.scale, valid=valid, count=self.pool.slots)
        keep = self.keep(self.residency.warm(shown.score))
        change = self.pool.exchange(keep)
        source = self.source(exact=False)
        for start in range(0, len(change.lanes), self.pages_at_once):
            some = change.only(slice(start, start + self.pages_at_once))
            states = source.read(some.lanes, some.pages)
            self.setting.ledger.moved("cold", "hot", "warm", len(states[0]) * source.codec.page_bytes)
            self.pool.install(some, *states)

    def scored(
        self,
        query: torch.Tensor,
        hot_lse: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        valid: torch.Tensor | None = None,
        always: torch.Tensor | None = None,
        count: int | None = None,
    ) -> Candidates:
        """The selector's input for `query`, [L, H, G, D], by `mass.estimate` over the index. `count`: number of pages
        with scores if these come from another process; None: the policy's."""
        index, of = self.index, self.shape
        assert index is not None
        if isinstance(index, NearKeys):
            wanted = round(self.setting.policy.scored_share * len(self) / of.tokens) if count is None else count
            return index.estimate(
                query,
                hot_lse,
                scale=scale,
                softcap=softcap,
                tokens=len(self),
                count=max(1, wanted),
                valid=valid,
                always=always,
            )
        return estimate(
            index.score(query),
            hot_lse,
            granularity=index.granularity,
            scale=scale,
            softcap=softcap,
            page_tokens=of.tokens,
            tokens=len(self),
            valid=valid,
            always=always,
        )

    # --- changes from outside ----------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Takes back the last `count` tokens, out of cold pages too. Tokens that return from pages are as they were
        stored: with a lossy codec, in the form that attention has used since."""
        if count <= len(self.tail):
            self.tail.drop_back(count)
            return
        self.ahead = Ahead()  # pages on their way may be gone
        left = max(len(self) - count, 0)
        assert self.sinks is not None
        sinks = self.sinks[0].shape[2]
        pages, rest = divmod(max(left - sinks, 0), self.shape.tokens)
        self.tail.drop_back(len(self.tail))
        if rest:
            lanes = self.lanes.of_rows(self.rows_count)
            states = self.source(exact=True).read(torch.arange(lanes), torch.full((lanes,), pages))
            self.tail.append(*(self._rows_of(each)[:, :, :rest] for each in states))
        for part in (self.exact, self.draft, self.index, self.truth, self.residency, self.pool):
            if part is not None:
                part.crop(pages)
        if left < sinks or not pages:
            self._all_hot(left)

    def _rows_of(self, states: torch.Tensor) -> torch.Tensor:
        """[L, H, P, D] to [B, KV heads, P, D]."""
        return states.reshape(self.rows_count, self.lanes.kv_heads, *states.shape[2:])

    def _all_hot(self, left: int) -> None:
        """No page is cold any longer: back to a tail alone."""
        assert self.sinks is not None
        keys, values = (states[:, :, :left] for states in self.sinks)
        rest = self.tail
        self.tail = Tail(keys, values)
        self.tail.append(keys, values)
        self.tail.append(rest.keys, rest.values)
        self.release_pages()

    def rows(self, rows: torch.Tensor) -> None:
        """Makes row i of the batch a copy of row `rows[i]`."""
        self.tail.rows(rows)
        lanes = self.lanes.rows(rows)
        if self.sinks is not None:
            keys, values = (states.index_select(0, rows) for states in self.sinks)
            self.sinks = keys, values
        for part in (self.exact, self.draft, self.index, self.truth, self.residency, self.pool):
            if part is not None:
                part.rows(lanes)
        before = self.ahead.hot_lse
        self.ahead = Ahead(hot_lse=before.index_select(0, lanes) if before is not None else None, lost=True)
        for name in ("last_queries", "before_query"):
            if (kept := getattr(self, name)) is not None:
                setattr(self, name, kept.index_select(0, lanes))

    def release_pages(self) -> None:
        """Frees the cold pages and all state about them."""
        for copy in (self.exact, self.draft):
            if copy is not None:
                copy.release()
        if self.index is not None:
            self.index.crop(0)
        self.exact = self.draft = self.sinks = None
        self.index = self.truth = self.residency = self.pool = None
        self.settled = self.warmed = False
        self.steps = 0


def _pages(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """[L, H, m * P, D] to [L, m, H, P, D]."""
    return states.unflatten(2, (-1, tokens)).transpose(1, 2)
