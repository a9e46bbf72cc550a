"""Grouping of extents into calls and threads. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from stepwell.longctx.store.places import Numbers

LONGEST = 1 << 20
"""Bytes from the first extent of a run to the last one."""

SHARE = 32 << 10
"""Bytes that are worth handing to another thread: one costs some 30 us, a page that the disk is asked for some 50."""

Run = tuple[int, int]
"""Half-open range of indexes into the sorted extents."""


def runs(offsets: Numbers, extent: int, gap: int) -> list[Run]:
    """Runs of the extents that begin at `offsets`, ascending: each begins at most `gap` bytes behind the one before it,
    and less than LONGEST behind the first of its run."""
    if len(offsets) == 0:
        return []
    apart = np.diff(offsets, prepend=offsets[0] - extent) > extent + gap
    group = np.cumsum(apart)
    begins = offsets[np.searchsorted(group, group)]
    piece = (offsets - begins) // LONGEST
    edges = np.flatnonzero((np.diff(group, prepend=-1) > 0) | (np.diff(piece, prepend=0) != 0)).tolist()
    return list(pairwise([*edges, len(offsets)]))


def shares(found: list[Run], extent: int, threads: int) -> list[list[Run]]:
    """The runs, in order, for at most `threads` threads: each has about as many extents, and enough to be worth it."""
    count = found[-1][1] if found else 0
    most = min(threads, len(found), 1 + count * extent // SHARE)
    dealt: list[list[Run]] = [[] for _ in range(max(1, most))]
    for run in found:
        dealt[run[0] * len(dealt) // count].append(run)
    return [share for share in dealt if share]
