"""Saves a prefilled cache, and makes one of what was saved: yesterday's document needs no prefill today.

What is saved is K and V of every token as attention saw them, in the model's dtype, so that another policy, budget or
place can open it; indexes and pools are made anew. The container is `saved`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from stepwell.errors import ConfigError
from stepwell.io.paths import home_dir, prepare_home
from stepwell.longctx.kv.layer import LayerState
from stepwell.longctx.kv.writable import writable
from stepwell.longctx.model.cache import TieredCache, TieredLayer
from stepwell.longctx.policy import AttentionMode
from stepwell.longctx.saved.container import ContextReader, write_context
from stepwell.longctx.saved.fingerprint import fingerprint
from stepwell.vault.keyfile import CONTEXT_KEY_NAME, open_key


def context_key(home: Path) -> memoryview:
    """The 32-byte key of saved contexts, made and kept in `home` (`longctx.key`, 0600) at its first use. It opens saved
    contexts, and nothing else does. `stepwell.io.paths.home_dir` gives the home. Raises AccessDenied SW-601 to SW-603
    (home cannot be used or is not safe) and the errors of `open_key`."""
    prepare_home(home)
    return open_key(home / CONTEXT_KEY_NAME)


_TOKENS_AT_ONCE = 4096
_IDS, _MASK = "tokens", "mask"


def save(model: Any, cache: TieredCache, path: Path, key: bytes | None) -> None:
    """Writes the cache under `path`, with the token ids that it knows of (those of the last `generate` or `prefill`).
    `key`: 32 bytes; None: the key in stepwell's home. Raises what `write_context` does; the cache stays as it is."""
    lengths = [layer.get_seq_length() for layer in cache.layers]
    manifest = {"fingerprint": fingerprint(model), "lengths": lengths, "kinds": [_kind(each) for each in cache.layers],
                "approximate": cache.setting.approximate}  # fmt: skip
    write_context(path, key if key is not None else context_key(home_dir(os.environ)), manifest, _Tensors(cache))


@writable()
def open_into(model: Any, cache: TieredCache, path: Path, key: bytes | None) -> None:
    """Fills `cache`, which must be empty, with what `save` wrote. Raises what `ContextReader` does, CapacityError, and
    ConfigError SW-135 if it was saved behind sparse steps and this policy is exact; the cache is empty then."""
    reader = ContextReader(path, key if key is not None else context_key(home_dir(os.environ)), fingerprint(model))
    with contextlib.closing(reader):
        approximate = bool(reader.manifest["approximate"])
        if approximate and cache.policy.mode is not AttentionMode.SPARSE:
            raise ConfigError(
                "SW-135",
                what=f"the policy {cache.policy.name!r} cannot go on with the saved context {path}",
                why="it was saved behind steps of a sparse policy, so it is not as full attention would have left it",
                fix="open it with a sparse policy, or save the context again before anything is generated",
            )
        try:
            cache.setting.approximate = approximate
            if _IDS in reader.names:
                cache.tokens = reader.read(_IDS)
            cache.mask = reader.read(_MASK) if _MASK in reader.names else None
            for number, length in enumerate(reader.manifest["lengths"]):
                if length:
                    states = (reader.read(f"{number}/{part}") for part in ("keys", "values"))
                    keys, values = states
                    _fill(cache.layers[number], length, keys, values, model.device)
        except BaseException:
            cache.reset()
            raise
    cache.measure()


def _kind(layer: Any) -> str:
    return "tiered" if isinstance(layer, TieredLayer) else "window"


def _fill(layer: Any, length: int, keys: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.lazy_initialization(keys.to(device), values.to(device))
        layer.keys, layer.values, layer.cumulative_length = keys.to(device), values.to(device), length
        return
    layer.lazy_initialization(keys[:, :, :0].to(device), values[:, :, :0].to(device))
    for start in range(0, length, _TOKENS_AT_ONCE):
        some = slice(start, start + _TOKENS_AT_ONCE)
        layer.state.append(keys[:, :, some].to(device), values[:, :, some].to(device))
        layer.state.spill()


class _Tensors(Mapping[str, torch.Tensor]):
    """Tensors that are made one by one, on demand."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._last: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[str]:
        if self._cache.tokens is not None:
            yield _IDS
        if self._cache.mask is not None:
            yield _MASK
        for number, layer in enumerate(self._cache.layers):
            if layer.get_seq_length():
                yield f"{number}/keys"
                yield f"{number}/values"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = {_IDS: self._cache.tokens, _MASK: self._cache.mask}
        if name in whole:
            found = whole[name]
            if found is None:
                raise KeyError(name)
            return found
        number, part = name.split("/")
        if self._last is None or self._last[0] != int(number):
            self._last = int(number), _states(self._cache.layers[int(number)])
        return self._last[1][part == "values"]


def _states(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all tokens of a layer, [B, KV heads, n, D], on the host."""
    if not isinstance(layer, TieredLayer):
        return layer.keys.cpu(), layer.values.cpu()
    assert layer.state is not None
    return whole(layer.state)


def whole(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all tokens, [B, KV heads, n, D], on the host."""
    parts = [(state.tail.keys.cpu(), state.tail.values.cpu())]
    if state.sinks is not None:
        lanes = state.lanes.of_rows(state.rows_count)
        step = max(1, state.pages_at_once // lanes)
        middle = []
        for start in range(0, state.pages, step):
            some = torch.arange(start, min(start + step, state.pages))
            read = state.source(exact=True).read(torch.arange(lanes).repeat_interleave(len(some)), some.repeat(lanes))
            middle.append(tuple(_tokens(state, each.cpu(), len(some)) for each in read))
        parts = [(state.sinks[0].cpu(), state.sinks[1].cpu()), *middle, *parts]
    keys, values = (torch.cat([part[which] for part in parts], 2) for which in (0, 1))
    return keys, values


def _tokens(state: LayerState, pages: torch.Tensor, count: int) -> torch.Tensor:
    """[L * m, H, P, D] to [B, KV heads, m * P, D]."""
    by_lane = pages.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
    return by_lane.reshape(state.rows_count, state.lanes.kv_heads, *by_lane.shape[2:])
