"""Divides the pool's slots among layers by what they gain there: KVDrive's windows (arXiv 2605.18071), after a while of
watching. Heads of a layer get the same, unlike in the paper: they share the layer's tensors."""

from __future__ import annotations

import numpy as np
import torch

from stepwell.longctx.parts.residency.allocate import allocate
from stepwell.longctx.parts.residency.hits import hit_curve

WINDOWS = (1, 2, 3, 4, 6, 8)


class Profile:
    """Selections of each layer of one cache in its first `steps` decode steps."""

    def __init__(self, steps: int) -> None:
        self.steps = max(steps, WINDOWS[-1] + 1)
        self._selected: dict[int, list[torch.Tensor]] = {}

    def note(self, layer: int, selected: torch.Tensor) -> None:
        """Notes a step's selection, [L, n] bool."""
        seen = self._selected.setdefault(layer, [])
        if len(seen) < self.steps:
            seen.append(selected.cpu())

    @property
    def ready(self) -> bool:
        return bool(self._selected) and all(len(seen) >= self.steps for seen in self._selected.values())

    def divide(self, slots: dict[int, int]) -> dict[int, int]:
        """Divides the slots anew: from the present slots of each layer to its new ones, in all no more than now. Each
        layer gets what its own window held; the rest is divided evenly."""
        gains, costs = [], []
        for layer in slots:
            curve = hit_curve(self._whole(layer), WINDOWS)
            wanted = sum(int(each.sum()) for each in self._selected[layer]) / self.steps
            gains.append(curve.hits.mean(1) * wanted)
            costs.append(np.ceil(curve.pages.max(1)))
        # A layer may get nothing at all: then its window is none.
        none = np.zeros((len(slots), 1))
        gain, cost = np.hstack([none, np.array(gains)]), np.hstack([none, np.array(costs)])
        chosen = allocate(gain, cost, sum(slots.values()))
        granted = [int(cost[item, option]) for item, option in enumerate(chosen.choices)]
        spare = (sum(slots.values()) - sum(granted)) // len(slots)
        return {layer: grant + spare for layer, grant in zip(slots, granted, strict=True)}

    def _whole(self, layer: int) -> np.ndarray:
        """[steps, L, n] bool."""
        seen = self._selected[layer]
        most = max(each.shape[1] for each in seen)
        return torch.stack([torch.nn.functional.pad(each, (0, most - each.shape[1])) for each in seen]).numpy()
