"""One exact prefill of a document, from which every policy starts, and full attention's logits behind it."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from stepwell.fidelity.document import Document

LAST_QUERIES = 64
"""Last tokens of the prompt, whose attention may show a policy what is important."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Documents with prompts of one length, side by side.

    `dense`: KV of all tokens of each prompt but its last; never changed. `queries`: of each layer, those of the last
    tokens in it, [B, query heads, n, D], after RoPE. `feed`: [T, B], inputs of the decode steps: each prompt's last
    token, then its continuation without the last one; a document that ends early repeats its last token, and the
    outputs are ignored. `logits`: of each document [its steps, V] float32, of full attention, from one pass over all of
    them.
    """

    documents: Sequence[Document]
    dense: DynamicCache
    queries: Sequence[torch.Tensor]
    feed: torch.Tensor
    logits: Sequence[torch.Tensor]

    def copy(self) -> DynamicCache:
        """The KV once more, to be changed."""
        return copy.deepcopy(self.dense)

    @property
    def common_steps(self) -> int:
        """Number of steps that all documents have."""
        return min(len(logits) for logits in self.logits)

    @property
    def token_numbers(self) -> int:
        """Numbers in K and V of one token of one document, in all layers."""
        return sum(layer.keys.shape[1] * (layer.keys.shape[-1] + layer.values.shape[-1]) for layer in self.dense.layers)

    def of_documents(self, steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of T steps, [B, V] each, in the form of `logits`."""
        return [torch.stack([step[row] for step in steps[: len(logits)]]) for row, logits in enumerate(self.logits)]


@torch.no_grad()
def prefill(model: Any, documents: Sequence[Document]) -> Prefilled:
    """Prefills one document after the other, so that a document's KV does not depend on its neighbours. Raises
    ValueError for prompts of different lengths."""
    if len({document.tokens for document in documents}) != 1:
        raise ValueError("prompts side by side have one length")
    feeds = [(document.prompt[-1], *document.continuation[:-1]) for document in documents]
    steps = max(map(len, feeds))
    alone = [_alone(model, document, feed) for document, feed in zip(documents, feeds, strict=True)]
    dense = alone[0].dense
    for layer, *others in zip(*(one.dense.layers for one in alone), strict=True):
        layer.keys = torch.cat([layer.keys, *(other.keys for other in others)])
        layer.values = torch.cat([layer.values, *(other.values for other in others)])
    return Prefilled(
        documents,
        dense,
        [torch.cat(queries) for queries in zip(*(one.queries for one in alone), strict=True)],
        torch.tensor([feed + feed[-1:] * (steps - len(feed)) for feed in feeds]).T.contiguous(),
        [one.logits for one in alone],
    )


@dataclass(frozen=True, slots=True)
class _Alone:
    dense: DynamicCache
    queries: list[torch.Tensor]
    logits: torch.Tensor


def _alone(model: Any, document: Document, feed: tuple[int, ...]) -> _Alone:
    dense = DynamicCache(config=model.config)
    with _captured(model) as queries:
        model(_row(document.prompt[:-1], model), past_key_values=dense, logits_to_keep=1)
    logits = model(_row(feed, model), past_key_values=copy.deepcopy(dense)).logits[0].float()
    return _Alone(dense, list(queries.values()), logits)


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
