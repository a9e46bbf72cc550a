"""One exact prefill of a document, from which every policy starts, and full attention's logits behind it."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from stepwell.bench.fidelity.document import Document

LAST_QUERIES = 64
"""Of the prompt, whose attention may tell a policy what is important."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`dense`: the KV of all of the prompt but its last token; nobody changes it. `queries`: of each layer, those of
    the last tokens in it, [1, query heads, n, D], after RoPE. `feed`: the tokens that decode steps take, one after the
    other: the prompt's last one, then the continuation without its own last one. `logits`: [T, V] float32, full
    attention's after each of them, from one pass over all."""

    document: Document
    dense: DynamicCache
    queries: list[torch.Tensor]
    feed: tuple[int, ...]
    logits: torch.Tensor

    def copy(self) -> DynamicCache:
        """The KV once more, to be changed."""
        return copy.deepcopy(self.dense)

    @property
    def token_numbers(self) -> int:
        """Numbers in K and V of one token, in all layers."""
        return sum(layer.keys.shape[1] * (layer.keys.shape[-1] + layer.values.shape[-1]) for layer in self.dense.layers)


@torch.no_grad()
def prefill(model: Any, document: Document) -> Prefilled:
    feed = (document.prompt[-1], *document.continuation[:-1])
    dense = DynamicCache(config=model.config)
    with _captured(model) as queries:
        model(_row(document.prompt[:-1], model), past_key_values=dense, logits_to_keep=1)
    logits = model(_row(feed, model), past_key_values=copy.deepcopy(dense)).logits[0].float()
    return Prefilled(document, dense, list(queries.values()), feed, logits)


def _row(ids: tuple[int, ...], model: Any) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


@contextmanager
def _captured(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """The last queries of each layer of the next forward pass, as attention sees them, by layer."""
    found: dict[int, torch.Tensor] = {}

    def attend(module: Any, query: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found[module.layer_idx] = query[:, :, -LAST_QUERIES:].detach().clone()
        return sdpa_attention_forward(module, query, *arguments, **named)

    # A name of its own, since transformers has no way to take one back; without a mask function masks are left out.
    name = f"stepwell_fidelity_{uuid.uuid4().hex}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield found
    finally:
        model.set_attn_implementation(before)
