"""Prediction of the next layer's query from this layer's input: early fetches, and ScoutAttention's selection.

The residual stream changes little from layer to layer, so the next layer's norm and query projection applied to this
layer's input come close to the query that it will have (cosine 0.95 and more from layer 3 on, measured; in layers 1 and
2 it fails). InfiniGen (arXiv 2406.19707) and ScoutAttention (arXiv 2603.27138) build on it. Here it is a hint: pages
are fetched early, and the actual query selects the pages to attend over, unless a policy says otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from stepwell.longctx.attention.sparse import predict
from stepwell.longctx.model.cache import TieredCache, TieredLayer

FIRST = 3
"""The first layer whose query can be predicted."""


def install(model: torch.nn.Module, lookahead: int = 1) -> list[Any]:
    """Hooks on the decoder's layers, each for the layer `lookahead` behind; the handles, to remove them by. None where
    the model has no layers as Llama's."""
    layers = _decoder_layers(model)
    handles = []
    for number, following in enumerate(layers[lookahead:], lookahead):
        this = layers[number - lookahead]
        if number >= FIRST and _kind(this) == _kind(following) and _can_ask(following):
            handles.append(this.register_forward_pre_hook(_Hook(number, following), with_kwargs=True))
    return handles


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) and hasattr(layers[0], "self_attn"):
            return list(layers)
    return []


def _kind(layer: torch.nn.Module) -> object:
    """Layers of one kind share their position embeddings."""
    return getattr(layer.self_attn, "sliding_window", None)


def _can_ask(layer: torch.nn.Module) -> bool:
    has_parts = hasattr(layer, "input_layernorm") and hasattr(layer.self_attn, "q_proj")
    return has_parts and hasattr(sys.modules[type(layer.self_attn).__module__], "apply_rotary_pos_emb")


class _Hook:
    def __init__(self, number: int, following: torch.nn.Module) -> None:
        self._number, self._layer = number, following
        self._rotate = sys.modules[type(following.self_attn).__module__].apply_rotary_pos_emb

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, hidden = kwargs.get("past_key_values"), args[0] if args else kwargs.get("hidden_states")
        if not isinstance(cache, TieredCache) or hidden is None or hidden.shape[1] != 1 or not cache.setting.sparse_now:
            return
        policy = cache.policy
        if not policy.prefetch and policy.query != "ahead":
            return
        cached = cache.layers[self._number]
        embeddings = kwargs.get("position_embeddings")
        if not isinstance(cached, TieredLayer) or cached.state is None or not cached.state.pages or embeddings is None:
            return
        attention = self._layer.self_attn
        states = attention.q_proj(self._layer.input_layernorm(hidden))
        query = states.view(*states.shape[:2], -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        query = query.transpose(1, 2)
        query, _ = self._rotate(query, query, *embeddings)
        predict(cached.state, query)
