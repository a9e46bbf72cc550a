"""How far two rows of logits are apart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Likeness:
    """`worst`: the greatest difference of two logits; `kl`: [T] KL(reference || other) in nats; `same_top1`: the share
    of steps with the same most likely token."""

    worst: float
    kl: torch.Tensor
    same_top1: float


def likeness(reference: torch.Tensor, other: torch.Tensor) -> Likeness:
    """Logits [T, V] each, of the same T steps."""
    worst = float((reference.double() - other.double()).abs().max())
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (reference, other))
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    same = (reference.argmax(-1) == other.argmax(-1)).double().mean()
    return Likeness(worst, kl, float(same))
