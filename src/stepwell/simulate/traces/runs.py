"""Block ids written as runs of successive numbers, `[[first, count], ...]`: two numbers where a prompt has thousands.

Used by the formats that are written so. A trace itself holds plain ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepwell.simulate.traces.chains import Blocks, chain, room_for, starts_of, within
from stepwell.simulate.traces.trace import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs by request: request i has the runs `starts[i]:starts[i + 1]`; run r is `firsts[r]`, `firsts[r] + 1`, ...,
    `counts[r]` ids."""

    starts: Ints  # [requests + 1]
    firsts: Ints  # >= 0
    counts: Ints  # >= 1

    @property
    def lengths(self) -> Ints:
        """Number of ids of each request."""
        ends = starts_of(self.counts)
        lengths: Ints = ends[self.starts[1:]] - ends[self.starts[:-1]]
        return lengths

    def blocks(self) -> Blocks:
        """All block ids."""
        starts = starts_of(self.lengths)
        room_for(int(starts[-1]))
        return Blocks(starts, np.repeat(self.firsts, self.counts) + within(self.counts))

    def chained(self) -> bool:
        """Whether each id stands behind one and the same id, or first, wherever it stands; without expanding runs."""
        before = np.empty_like(self.firsts)
        before[1:] = (self.firsts + self.counts - 1)[:-1]
        before[self.starts[:-1][np.diff(self.starts) > 0]] = -1
        order = np.argsort(self.firsts, kind="stable")
        firsts, parents = self.firsts[order], before[order]
        if np.any((firsts[1:] == firsts[:-1]) & (parents[1:] != parents[:-1])):
            return False
        # Inside a run each id stands behind the one before it. No run may pass over one that begins elsewhere.
        jumps = firsts[parents != firsts - 1]
        passed = np.searchsorted(jumps, self.firsts + 1) < np.searchsorted(jumps, self.firsts + self.counts)
        return not passed.any()

    def regrouped(self, step: int, full: Ints) -> tuple[Blocks, int]:
        """The ids of blocks that are `step` (> 1) times as large, of which only full ones are named; `full` are the
        full small blocks of each request. A block is named by the last of its small ones. If these are not chained
        they are renamed first: the second value is by how many they thereby became more."""
        counts = np.minimum(self.lengths, full) // step
        starts = starts_of(counts)
        room_for(int(starts[-1]))
        small = starts_of(self.lengths)
        places = np.repeat(small[:-1], counts) + (within(counts) + 1) * step - 1
        if self.chained():
            ends = np.cumsum(self.counts)
            run = np.searchsorted(ends, places, side="right")
            return Blocks(starts, self.firsts[run] + places - (ends - self.counts)[run]), 0
        blocks = self.blocks()
        renamed = chain(blocks)
        return Blocks(starts, renamed[places]), int(renamed.max()) + 1 - len(np.unique(blocks.ids))


def runs_of(ids: Ints) -> list[list[int]]:
    """One request's ids as `[[first, count], ...]`."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    counts = np.diff(np.append(starts, len(ids)))
    return np.stack([ids[starts], counts], axis=1).tolist()  # type: ignore[no-any-return]
