"""The canary: of so many prefixes that could be recalled, one is left to the engine, and what it computes is compared
with what is stored.

    matched: not offered -> allocated: a few blocks leased -> computed and confirmed -> compared by the workers
                                                                                    -> the well is told the errors

This catches what a fingerprint cannot: weights that are not those of their name. The well judges, because it knows what
other engines of the namespace have seen (`stepwell.hierarchy.canaries`); here errors are made and no more. A canary
costs its request the recall that it did not get, and nothing else: one that does not end well is one less.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

EVERY = 1000
"""Prefixes that could be recalled, of which one is a canary, if nothing else is said."""

KINDS = ("float32", "float16", "bfloat16")
"""Numbers that can be compared. Quantised ones cannot yet."""

WORST = 1e6
"""Error of blocks that are not comparable at all: a number in one where the other has none."""


def kind_of(dtype: Any) -> str | None:
    """What a torch dtype is called in KINDS; None: it cannot be compared."""
    name = str(dtype).removeprefix("torch.")
    return name if name in KINDS else None


def relative_error(fresh: npt.NDArray[np.uint8], stored: npt.NDArray[np.uint8], kind: str) -> float:
    """||fresh - stored|| / ||stored|| in float32, at most WORST, of two arrays of bytes that hold numbers of this kind.
    Places where neither has a finite number count as equal. Raises KeyError for other kinds."""
    if np.array_equal(fresh, stored):
        return 0.0
    a, b = _floats(fresh, kind), _floats(stored, kind)
    with np.errstate(all="ignore"):
        error = _ratio(a, b)
        if not np.isfinite(error):
            either = np.isfinite(a) | np.isfinite(b)
            error = _ratio(a[either], b[either])
    return min(error, WORST) if np.isfinite(error) else WORST


def _ratio(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """In units of the largest of `b`, so that squares neither vanish nor overflow."""
    scale = float(np.max(np.abs(b), initial=0.0))
    if not scale:
        return math.inf if np.any(a) else 0.0
    a, b = a / scale, b / scale
    difference = a - b
    return float(np.sqrt(np.sum(difference * difference)) / np.sqrt(np.sum(b * b)))


def _floats(raw: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    flat = np.ascontiguousarray(raw).reshape(-1)
    if kind == "bfloat16":  # the upper half of a float32
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return flat.view({"float32": np.float32, "float16": np.float16}[kind]).astype(np.float32)
