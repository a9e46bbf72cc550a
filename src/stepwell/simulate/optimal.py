"""The most that any policy can hit: Belady's MIN with bypass, counted by leading runs."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from stepwell.simulate.replay import Replayed
from stepwell.simulate.traces.trace import Ints, Trace

OPTIMAL = "opt"


def next_uses(trace: Trace) -> Ints:
    """For each id of the trace: the number of the next request that asks for it, len(trace) if none does."""
    asks = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    order = np.argsort(trace.ids, kind="stable")
    following = np.full(len(order), len(trace), np.int64)
    same = trace.ids[order[1:]] == trace.ids[order[:-1]]
    following[order[:-1][same]] = asks[order[1:][same]]
    return following


def optimal(trace: Trace, capacity: int) -> Replayed:
    """Always keeps the `capacity` blocks whose next use is nearest (Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966; what comes last does not enter). No block is asked for before its parent, so what
    is held is closed under prefixes without further ado, and hits in blocks are the most there can be. Seconds saved
    are not maximised: a later block of a prompt saves more.

    Because of that closure, what is held and next asked for by request r are the blocks [low, high) of its path, and
    when r comes, low is 0.
    """
    following = next_uses(trace)
    starts = trace.starts.tolist()
    n = len(trace)
    low, high = [0] * (n + 1), [0] * (n + 1)
    farthest: list[int] = []  # -r of all with blocks
    hits = np.zeros(n, np.int64)
    held = entered = 0
    for i in range(n):
        hit = high[i]
        hits[i] = hit
        held -= hit
        high[i] = 0
        pieces = _pieces(following[starts[i] : starts[i + 1]], n)
        for first, last, r in pieces:
            if high[r]:
                low[r] = first
            else:
                low[r], high[r] = first, last
                heapq.heappush(farthest, -r)
            held += last - first
        while held > capacity:
            r = -farthest[0]
            gone = min(held - capacity, high[r] - low[r])
            held -= gone
            high[r] -= gone
            if high[r] == low[r]:
                high[r] = 0
                heapq.heappop(farthest)
        entered += sum(max(0, min(last, high[r]) - max(first, hit)) for first, last, r in pieces)
    return Replayed(hits, entered)


def _pieces(following: Ints, never: int) -> list[tuple[int, int, int]]:
    """A request's blocks [first, last) by the request that asks for them next; without those never asked for again."""
    if not len(following):
        return []
    cuts = [0, *(np.flatnonzero(following[1:] != following[:-1]) + 1).tolist(), len(following)]
    found = [(first, last, int(following[first])) for first, last in itertools.pairwise(cuts)]
    return [piece for piece in found if piece[2] < never]
