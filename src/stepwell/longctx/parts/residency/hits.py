"""Hit rates of step windows, from recorded selections: what KVDrive profiles before it allocates windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
