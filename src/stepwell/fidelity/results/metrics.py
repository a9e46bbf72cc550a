"""Comparison of a policy's next-token distributions with full attention's, on the same tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepwell.demo.results import stats
from stepwell.fidelity.document import Document
from stepwell.fidelity.results import bootstrap

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_STEPS_AT_ONCE = 64  # steps of float64 logits of a large vocabulary


@dataclass(frozen=True, slots=True)
class Compared:
    """One document under one policy, step by step of its continuation. `kl`: KL(full || policy) in nats; `dnll`: how
    much less likely the gold token became, in nats; `same_top1`; `right` and `full_right`: the most likely token is the
    gold one. `gold`: the positions of fields (all, where a task has none), `digits`: how many tokens of fields;
    `fields`: the same by field."""

    kl: Floats
    dnll: Floats
    same_top1: Flags
    right: Flags
    full_right: Flags
    gold: tuple[int, ...]
    digits: int
    fields: tuple[tuple[int, int], ...]


def compare(document: Document, full: torch.Tensor, policy: torch.Tensor) -> Compared:
    """Compares logits, [T, V] each, for the T tokens of the continuation."""
    gold = torch.tensor(document.continuation)
    kl, dnll = [], []
    for at in range(0, len(gold), _STEPS_AT_ONCE):
        rows = slice(at, at + _STEPS_AT_ONCE)
        p, q = (torch.log_softmax(logits[rows].double(), -1) for logits in (full, policy))
        # A probability of 0 adds nothing, whatever the other side says.
        terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
        kl.append(terms.sum(-1).clamp(min=0))
        dnll.append((p - q).gather(-1, gold[rows, None])[:, 0])
    best, full_best = policy.argmax(-1), full.argmax(-1)
    positions = document.gold_positions()
    return Compared(
        kl=torch.cat(kl).numpy(),
        dnll=torch.cat(dnll).numpy(),
        same_top1=(best == full_best).numpy(),
        right=(best == gold).numpy(),
        full_right=(full_best == gold).numpy(),
        gold=tuple(positions or range(len(gold))),
        digits=len(positions),
        fields=tuple((field.start, field.stop) for field in document.fields),
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """Results over several documents, pooled over their tokens. Intervals are of 95 %, documents resampled.
    `field_difference`: the policy's less full attention's. `whole_fields`: share of fields with every token right, None
    without fields."""

    documents: int
    tokens: int
    digits: int
    kl: stats.Estimate
    kl_p99: float
    kl_max: float
    dnll: stats.Estimate
    top1: stats.Estimate
    field_accuracy: stats.Estimate
    full_field_accuracy: stats.Estimate
    field_difference: stats.Estimate
    whole_fields: float | None
    full_whole_fields: float | None


def summarise(found: Sequence[Compared], seed: int = 0) -> Summary:
    """Raises ValueError for no documents."""
    steps = [len(one.kl) for one in found]
    golds = [len(one.gold) for one in found]
    right = [float(one.right[list(one.gold)].sum()) for one in found]
    full_right = [float(one.full_right[list(one.gold)].sum()) for one in found]
    kl = np.concatenate([one.kl for one in found])
    return Summary(
        documents=len(found),
        tokens=sum(steps),
        digits=sum(one.digits for one in found),
        kl=bootstrap.ratio([float(one.kl.sum()) for one in found], steps, seed),
        kl_p99=float(np.percentile(kl, 99)),
        kl_max=float(kl.max()),
        dnll=bootstrap.ratio([float(one.dnll.sum()) for one in found], steps, seed),
        top1=bootstrap.ratio([float(one.same_top1.sum()) for one in found], steps, seed),
        field_accuracy=bootstrap.ratio(right, golds, seed),
        full_field_accuracy=bootstrap.ratio(full_right, golds, seed),
        field_difference=bootstrap.difference((right, golds), (full_right, golds), seed),
        whole_fields=_whole([(one.right, one.fields) for one in found]),
        full_whole_fields=_whole([(one.full_right, one.fields) for one in found]),
    )


def _whole(found: Sequence[tuple[Flags, tuple[tuple[int, int], ...]]]) -> float | None:
    whole = [bool(right[start:stop].all()) for right, fields in found for start, stop in fields]
    return sum(whole) / len(whole) if whole else None
