"""Block ids of many requests in one flat array: what "prefix-chained" means, and how ids become so.

Ids are chained if each id stands behind one and the same id (or first) wherever it stands. By induction it then names
its block together with all before it: equal ids stand at equal positions behind equal prefixes, and a cache has a
leading run of a request's blocks, never one from its middle alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepwell.simulate.traces.problems import unusable
from stepwell.simulate.traces.trace import Ints

MAX_IDS = 1 << 27  # ids of a whole trace: 1 GiB, and a few times that while it is read


class Blocks(NamedTuple):
    """Block ids by request: request i asks for `ids[starts[i]:starts[i + 1]]`."""

    starts: Ints  # [requests + 1]
    ids: Ints


def room_for(ids: int) -> None:
    """Raises ConfigError SW-122 if a trace with so many ids would take more memory than one may."""
    if ids > MAX_IDS:
        raise unusable(
            "a trace of this size",
            f"its requests name more than {MAX_IDS:,} blocks",
            "take larger blocks (block_tokens) or a part of it",
        )


def starts_of(counts: Ints) -> Ints:
    """Start of each of `counts` if they lie side by side, and the end: one more number than `counts`."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def within(counts: Ints) -> Ints:
    """The numbers 0 .. counts[0] - 1, then 0 .. counts[1] - 1, and so on."""
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def reordered(blocks: Blocks, order: Ints) -> Blocks:
    """The requests of `blocks` in another order."""
    if bool(np.all(order[1:] > order[:-1])):
        return blocks
    counts = np.diff(blocks.starts)[order]
    places = np.repeat(blocks.starts[order], counts) + within(counts)
    return Blocks(starts_of(counts), blocks.ids[places])


def dense(ids: Ints) -> Ints:
    """The same ids numbered 0 .. distinct - 1 in the order of their first appearance."""
    if not len(ids):
        return ids
    low, high = int(ids.min()), int(ids.max())
    if high - low <= 2 * len(ids) + 1024:
        ids, span = ids - low, high - low + 1
    else:
        values, ids = np.unique(ids, return_inverse=True)
        span = len(values)
    first = np.empty(span, np.int64)
    first[ids[::-1]] = np.arange(len(ids))[::-1]  # the last write of equal ids is kept: the first position
    new = first[ids] == np.arange(len(ids))
    number = np.empty(span, np.int64)
    number[ids[new]] = np.arange(np.count_nonzero(new))
    return number[ids]


def chained(blocks: Blocks) -> bool:
    """Whether ids, which are dense, are prefix-chained."""
    if not len(blocks.ids):
        return True
    before = np.empty_like(blocks.ids)
    before[1:] = blocks.ids[:-1]
    before[blocks.starts[:-1][np.diff(blocks.starts) > 0]] = -1
    parent = np.empty(int(blocks.ids.max()) + 1, np.int64)
    parent[blocks.ids] = before
    return bool(np.array_equal(parent[blocks.ids], before))


def chain(blocks: Blocks) -> Ints:
    """Ids that name the same blocks together with all before them, dense: the nodes of a trie of the requests."""
    nodes: dict[tuple[int, int], int] = {}
    renamed = np.empty_like(blocks.ids)
    bounds = blocks.starts.tolist()
    for start, end in pairwise(bounds):
        node = -1
        path = []
        for block in blocks.ids[start:end].tolist():
            node = nodes.setdefault((node, block), len(nodes))
            path.append(node)
        renamed[start:end] = path
    return renamed
