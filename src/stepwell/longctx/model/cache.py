"""A transformers cache whose KV lies across tiers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer

from stepwell.errors import ConfigError
from stepwell.longctx.kv.budget import HotBudget
from stepwell.longctx.kv.fetch.fetcher import Fetcher
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.profile import Profile
from stepwell.longctx.kv.setting import CacheSetting
from stepwell.longctx.kv.writable import writable
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.model import hook
from stepwell.longctx.model.support import TIERED, layer_types
from stepwell.longctx.near.keys import NearKeys
from stepwell.longctx.near.kinds import describe
from stepwell.longctx.policies import named
from stepwell.longctx.policy import Policy
from stepwell.longctx.store.link import LinkQueue, ModelledLink
from stepwell.longctx.stores import Stores


class TieredLayer(CacheLayerMixin):
    """One layer of the model. `update` returns the new keys and values only: attention finds the rest through the
    handshake. Nothing here is ever in `keys` and `values`, so all that transformers does with those is overridden."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, setting: CacheSetting, states: dict[int, LayerState], number: int, group: int) -> None:
        super().__init__()
        self._setting, self._states, self._number, self._group = setting, states, number, group
        self.state: LayerState | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.state = LayerState(self._setting, self._states, self._number, key_states, value_states, self._group)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @writable()
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.dtype != value_states.dtype:  # under autocast rotated keys are float32, and values are not
            kind = torch.promote_types(key_states.dtype, value_states.dtype)
            key_states, value_states = key_states.to(kind), value_states.to(kind)
        if self.state is None:
            self.lazy_initialization(key_states, value_states)
        assert self.state is not None
        self.state.append(key_states.detach(), value_states.detach())
        hook.leave(self.state, key_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return len(self.state) if self.state is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.state is not None:
            self.state.release_pages()
            self._states.pop(self._number, None)
        self.state = None
        self.is_initialized = False

    @writable()
    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens at the end: `-tokens_to_remove` of them if it is negative; positive is transformers' older
        form, the length to crop to."""
        length = self.get_seq_length()
        count = -tokens_to_remove if tokens_to_remove < 0 else length - tokens_to_remove if tokens_to_remove else 0
        if self.state is not None and count > 0:
            self.state.crop(min(count, length))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self._rows(torch.arange(self.state.rows_count).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self._rows(torch.arange(self.state.rows_count, device=indices.device)[indices])

    @writable()
    def _rows(self, rows: torch.Tensor) -> None:
        if self.state is not None:
            self.state.rows(rows.to(self.state.tail.keys.device))

    def offload(self) -> None:
        """Does nothing: pages step down by themselves."""

    def prefetch(self) -> None:
        """Does nothing: pages step up by themselves."""

    @property
    def batch_size(self) -> int:
        return self.state.rows_count if self.state is not None else -1


class TieredCache(Cache):
    """A cache for `past_key_values`, of one batch of sequences, across the model's device, host memory and disk.

    Only inside `attach(model)`, or with the attention implementation "stepwell" set. `hot_tokens`: of each row and
    layer, at most so many are on the model's device between steps (a step has what it fetches in addition, 32 MiB at a
    time). `host`: bytes in host memory, `disk`: directories as in "PATH:SIZE"; what steps down goes to host first. When
    both are full, the forward pass raises CapacityError SW-209, and the cache can no longer be used. `audit`: measures
    what was truly left out, too, at the price of all keys in memory.

    Raises Unsupported (SW-716) for a model that it does not know how to serve, ConfigError for impossible sizes.
    """

    def __init__(
        self,
        config: Any,
        policy: str | Policy = "stepwell",
        *,
        hot_tokens: int = 2048,
        host: int | str | None = "4GiB",
        disk: str | Sequence[str] | None = None,
        audit: bool = False,
        link: ModelledLink | LinkQueue | None = None,
    ) -> None:
        hook.register()
        kinds = layer_types(config)
        chosen = named(policy) if isinstance(policy, str) else policy
        self.policy = chosen
        self.ledger = Ledger()
        budget = HotBudget.divide(hot_tokens, chosen)
        near = chosen.executor == "near_data"
        if near and chosen.index is not None:
            describe(chosen.index)  # raises now for a kind that the other process cannot make
        stores = Stores(host, disk, link, near=near)
        fetcher = Fetcher(self.ledger, beside=bool(near or disk or link or torch.cuda.is_available()))
        self.setting = CacheSetting(
            chosen,
            budget,
            self.ledger,
            fetcher,
            stores.of,
            stores.near,
            first=kinds.index(TIERED),
            profile=_profile(chosen, budget),
            audit=audit,
        )
        text = config.get_text_config(decoder=True)
        group = text.num_attention_heads // text.num_key_value_heads
        states: dict[int, LayerState] = {}
        layers: list[CacheLayerMixin] = [
            TieredLayer(self.setting, states, number, group)
            if kind == TIERED
            else DynamicSlidingWindowLayer(text.sliding_window)
            for number, kind in enumerate(kinds)
        ]
        super().__init__(layers=layers)
        self.tokens: torch.Tensor | None = None
        """[B, n] ids of what is in it, as far as `attach` has seen them."""
        self.mask: torch.Tensor | None = None
        """[B, n] of the padding in `tokens`; None: there is none."""
        self._stores = stores
        self._finish = weakref.finalize(self, _close, fetcher, stores)

    @property
    def tiered(self) -> list[TieredLayer]:
        """The layers of ours, without those that have a window."""
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]

    @writable()
    def adopt(self, dense: DynamicCache, queries: Sequence[torch.Tensor] | None = None) -> None:
        """Takes a copy of what a prompt left in transformers' own cache, as if the prompt had been computed with this
        one, which must be empty. `queries`: of the last prompt tokens in each layer, [B, query heads, Q, D], by which
        policies know what was important. Raises CapacityError."""
        for number, (ours, theirs) in enumerate(zip(self.layers, dense.layers, strict=True)):
            keys, values = theirs.keys, theirs.values
            if not isinstance(ours, TieredLayer):
                ours.lazy_initialization(keys, values)
                ours.keys, ours.values = keys.clone(), values.clone()
                ours.cumulative_length = theirs.cumulative_length
                continue
            ours.lazy_initialization(keys, values)
            assert ours.state is not None
            ours.state.append(keys, values)
            if queries is not None:
                ours.state.scale = queries[number].shape[-1] ** -0.5
                ours.state.remember(ours.state.lanes.queries(queries[number]))
            ours.state.spill()
            ours.state.settle(None)
        self.measure()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == 0:
            self._check()
        if self.setting.profile is not None and self.setting.profile.ready:
            self._divide(self.setting.profile)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check(self) -> None:
        """Raises ConfigError SW-133 where going on would give answers from a part of the context, in silence."""
        why = None
        if not self._finish.alive:
            why = "it is closed"
        elif len(lengths := {layer.get_seq_length() for layer in self.layers}) > 1:
            why = (
                f"a pass over its last tokens was interrupted: its layers have {min(lengths)} to {max(lengths)} tokens"
            )
        if why is not None:
            raise ConfigError(
                "SW-133",
                what="this cache of a long context can no longer be used",
                why=why,
                fix="start again with a new cache, or `reset()` one that is not closed",
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back so many tokens at the end, given as a negative number (positive: the length to crop to). Raises
        ConfigError SW-134, and leaves all as it is, where layers with a window no longer have what was before:
        `activate_past_recording()` keeps what comes from then on, until the next crop."""
        length = self.get_seq_length()
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0)
        count = min(count, length)
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer) and count and layer.is_initialized:
                self._check_window(layer, length - count, count)
        for layer in self.layers:
            if count or getattr(layer, "record_past", False):  # with 0, a window forgets what it has recorded
                layer.crop(-count)
        if self.tokens is not None and self.tokens.shape[1] >= length:
            self.tokens = self.tokens[:, : length - count]
            self.mask = self.mask[:, : length - count] if self.mask is not None else None

    def _check_window(self, layer: DynamicSlidingWindowLayer, left: int, count: int) -> None:
        held = layer.keys.shape[2] - count
        if held >= min(left, layer.sliding_window - 1) and (layer.record_past or left + count < layer.sliding_window):
            return
        raise ConfigError(
            "SW-134",
            what=f"{count} tokens cannot be taken back out of this cache",
            why=f"the layers with a window of {layer.sliding_window} tokens have forgotten what was before them",
            fix="call `activate_past_recording()` before what you may take back, or start again with a new cache",
        )

    def reset(self) -> None:
        """Empties the cache, which is then as new."""
        super().reset()
        hook.forget(self.setting)
        self.tokens = self.mask = None
        self.setting.approximate = False
        self.setting.profile = _profile(self.policy, self.setting.budget)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.tokens is not None:
            self._rows(torch.arange(len(self.tokens)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.tokens is not None:
            self._rows(torch.arange(len(self.tokens), device=indices.device)[indices])

    def _rows(self, rows: torch.Tensor) -> None:
        """Makes row i of the known tokens a copy of row `rows[i]`."""
        for name in ("tokens", "mask"):
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known[rows.to(known.device)] if int(rows.max()) < len(known) else None)

    def _divide(self, profile: Profile) -> None:
        """Divides the pools' slots between two layers' attention, when no pool is in use, once all layers have one
        (again after a crop)."""
        pools = {
            state.number: state.pool
            for layer in self.tiered
            if (state := layer.state) is not None and state.pool is not None
        }
        if len(pools) < len(self.tiered):
            return
        for number, slots in profile.divide({number: pool.slots for number, pool in pools.items()}).items():
            pools[number].resize(slots)
        self.setting.profile = None

    def measure(self) -> None:
        """Notes in the ledger the bytes in each tier now."""
        states = [layer.state for layer in self.tiered if layer.state is not None]
        windows = [each for layer in self.layers if not isinstance(layer, TieredLayer) and layer.is_initialized
                   for each in (layer.keys, layer.values)]  # fmt: skip
        hot = sum(state.hot_bytes for state in states) + sum(each.nbytes for each in windows)
        sizes = {"hot": hot, "index": sum(state.index_bytes for state in states)}
        sizes["near"] = sum(state.index.far_bytes for state in states if isinstance(state.index, NearKeys))
        self.ledger.sizes = sizes | self._stores.bytes_by_tier()

    def exactly(self) -> AbstractContextManager[None]:
        """`with cache.exactly():` steps of one token attend over everything in any policy."""
        return _set(self.setting, "exact_now")

    def drafting(self) -> AbstractContextManager[None]:
        """`with cache.drafting():` steps of a VERIFIED policy are sparse, and the caller checks them. Elsewhere they
        attend over everything."""
        return _set(self.setting, "drafting")

    def close(self) -> None:
        """Frees memory and disk space. Idempotent; also happens when the cache is no longer referenced."""
        self.measure()
        self.reset()
        self._finish()


def _profile(policy: Policy, budget: HotBudget) -> Profile | None:
    return Profile(policy.profile_steps) if policy.profile_steps and budget.pool else None


@contextmanager
def _set(setting: CacheSetting, name: str) -> Iterator[None]:
    before = getattr(setting, name)
    setattr(setting, name, True)
    try:
        yield
    finally:
        setattr(setting, name, before)


def _close(fetcher: Fetcher, stores: Stores) -> None:
    """Runs in any thread: a cache in a reference cycle is collected wherever memory is allocated."""
    if threading.current_thread().name.startswith("stepwell-"):  # it may be one of those that would wait for itself
        threading.Thread(target=_close, args=(fetcher, stores), name="close-stepwell").start()
        return
    fetcher.close()
    stores.close()
