"""Attention in parts, and the one function that merges parts: the core of exactness.

Softmax attention over a set of keys is a fold over any partition of that set: each part keeps its greatest logit, the
sum of its exponentials below that, and the sum of values weighted by them; two parts merge by scaling both to the
greater of their peaks (online softmax: Milakov and Gimelshein, arXiv 1805.02867; partial results with their
log-sum-exp: FlashDecoding). Merging is associative and commutative up to rounding, so the tier of a page and the order
in which pages arrive do not matter. All of it is float32, in any dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TILE_NUMBERS = 1 << 24
"""Logits in memory at a time (64 MiB): a long prompt over many pages is attended in tiles of keys."""


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of the keys. `peak` and `total`: [..., Q], `output`: [..., Q, D], not normalised. A part
    without keys has the peak -inf, the total 0 and the output 0."""

    output: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Log of the sum of exp(logit): [..., Q]; -inf without keys."""
        return self.peak + self.total.log()


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
) -> PartialAttention:
    """The part of `query` [L, H, G, Q, D] over `keys` [L, H, N, D] and `values` [L, H, N, Dv], in any float types.

    `valid`: bool, broadcastable to [L, H, G, Q, N], True where a key may be seen. `softcap`: logits are capped to
    softcap * tanh(logit / softcap) before they are masked, as Gemma 2 does. The part's axes are [L, H, G, Q].
    """
    lanes, heads, group, steps, dim = query.shape
    count = keys.shape[-2]
    scaled = (query.float() * scale).reshape(lanes, heads, group * steps, dim)
    tile = max(64, _TILE_NUMBERS // max(1, lanes * heads * group * steps))
    found: PartialAttention | None = None
    for start in range(0, max(count, 1), tile):
        end = min(start + tile, count)
        logits = scaled @ keys[:, :, start:end].float().transpose(-1, -2)
        logits = logits.view(lanes, heads, group, steps, end - start)
        if softcap is not None:
            logits = (logits / softcap).tanh_() * softcap
        if valid is not None:
            seen = valid if valid.shape[-1] == 1 else valid[..., start:end]
            logits = logits.masked_fill(~seen, -torch.inf)
        part = _fold(logits, values[:, :, start:end].float())
        found = part if found is None else merge(found, part)
    assert found is not None
    return found


def _fold(logits: torch.Tensor, values: torch.Tensor) -> PartialAttention:
    lanes, heads, group, steps, count = logits.shape
    if not count:
        output = logits.new_zeros(lanes, heads, group, steps, values.shape[-1])
        return PartialAttention(
            output, logits.new_full(logits.shape[:-1], -torch.inf), logits.new_zeros(logits.shape[:-1])
        )
    peak = logits.amax(-1)
    weights = (logits - _finite(peak)[..., None]).exp_()
    output = weights.view(lanes, heads, group * steps, count) @ values
    return PartialAttention(output.view(lanes, heads, group, steps, -1), peak, weights.sum(-1))


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Attention over the keys of both, which must have none in common."""
    peak = torch.maximum(a.peak, b.peak)
    base = _finite(peak)
    of_a, of_b = (a.peak - base).exp(), (b.peak - base).exp()
    return PartialAttention(
        a.output * of_a[..., None] + b.output * of_b[..., None], peak, a.total * of_a + b.total * of_b
    )


def finish(part: PartialAttention) -> torch.Tensor:
    """The attention's output, [..., Q, Dv] in float32; zeros where no key could be seen."""
    return part.output / part.total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]


def sink(logits: torch.Tensor, like: PartialAttention) -> PartialAttention:
    """A learned sink: a key whose value is zero, that only takes mass away (gpt-oss). `logits`: [H, G] or anything that
    broadcasts to `like`'s peak."""
    peak = logits.float().expand_as(like.peak)
    return PartialAttention(torch.zeros_like(like.output), peak, torch.ones_like(peak))


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """The peak, with 0 in place of -inf: exp(-inf - 0) is then 0, where exp(-inf + inf) would be NaN."""
    return torch.where(peak == -torch.inf, 0.0, peak)
