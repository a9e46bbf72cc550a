"""How far pages that an engine computed are from those that were stored: relative errors, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.engines.paged.pool import Row
from stepwell.io.memory import Bytes

KINDS = ("float32", "float16", "bfloat16")
"""Numbers that can be compared. Quantised ones cannot yet."""

WORST = 1e6
"""Error of pages that differ beyond comparison: a number in one where the other has none."""


def compare(fresh: Bytes, stored: Bytes, rows: Sequence[Row]) -> list[float]:
    """Relative errors of each row's K, then of its V. Both arrays are (pages, page_bytes). Raises KeyError for numbers
    that cannot be compared."""
    errors: list[float] = []
    at = 0
    for row in rows:
        whole = (len(fresh), *row.split)
        a, b = fresh[:, at : at + row.nbytes].reshape(whole), stored[:, at : at + row.nbytes].reshape(whole)
        errors += [relative_error(a[:, :, half], b[:, :, half], row.kind) for half in (0, 1)]
        at += row.nbytes
    return errors


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
    """Relative error, computed in units of the largest of `b`, so that squares neither vanish nor overflow."""
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
