"""Divides the pool's slots among layers by what they gain there: KVDrive's windows (arXiv 2605.18071), after a while of
watching. Heads of a layer get the same, unlike in the paper: they share the layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.longctx.parts.residency.allocate import allocate


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hit rates by window and lane. `hits` [W, L]: the share of the selected pages that had been selected in one of the
    window's steps before; 1 where nothing was selected. `pages` [W, L]: mean number of pages that the window held."""

    windows: tuple[int, ...]
    hits: np.ndarray
    pages: np.ndarray


def hit_curve(selections: np.ndarray, windows: Sequence[int]) -> HitCurve:
    """`selections`: [steps, L, n] bool, False for pages that did not exist yet. All windows are judged by the same
    steps: those that have the longest window behind them. Raises ValueError if there are none."""
    chosen = np.asarray(selections, dtype=bool)
    longest = max(windows)
    if min(windows) < 1 or chosen.ndim != 3 or len(chosen) <= longest:
        raise ValueError(f"windows {tuple(windows)} need more steps than {chosen.shape} has, and are at least 1")
    counts = np.concatenate([np.zeros_like(chosen[:1], dtype=np.int32), chosen.cumsum(0, dtype=np.int32)])
    judged = chosen[longest:]
    wanted = judged.sum((0, 2))
    hits, pages = [], []
    for window in windows:
        held = counts[longest:-1] > counts[longest - window : -1 - window]
        hits.append(np.where(wanted > 0, (held & judged).sum((0, 2)) / np.maximum(wanted, 1), 1.0))
        pages.append(held.sum((0, 2)) / len(judged))
    return HitCurve(tuple(windows), np.stack(hits), np.stack(pages))


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
