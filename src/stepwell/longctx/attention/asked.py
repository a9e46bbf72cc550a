"""The request of a model's attention to a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the model's attention to a layer. `mask`: [B, tokens] bool, False for padding; None: there is none.
    `sinks`: learned sink logits, one for each query head."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
