"""Traces: requests in the order of time, each with the ids of the blocks that it asks for.

Flat arrays rather than an object a request: a replay walks millions of ids. `formats` and `generator` make traces by
way of `assemble`, which guarantees the order and chaining described here; the replay and the tables of results read
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """`n` requests. Request i asks for the blocks `ids[starts[i]:starts[i + 1]]`: the leading full blocks of its
    prompt, and a partly filled last one where the format names it. A request may ask for none.

    Ids are prefix-chained: an id names a block and all before it, so equal ids stand at equal positions behind equal
    prefixes, and no request has an id twice. They are numbered 0, 1, ... in the order of their first appearance. The
    arrays never change.
    """

    name: str
    block_tokens: int
    times: Floats  # [n] seconds since the first request, non-decreasing, from 0
    inputs: Ints  # [n] prompt tokens, >= 0
    outputs: Ints  # [n] generated tokens, 0 if unknown
    sessions: Ints  # [n] number of the conversation, -1 if unknown
    starts: Ints  # [n + 1] from 0, non-decreasing
    ids: Ints  # [starts[-1]]

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.times)

    @property
    def distinct(self) -> int:
        """Number of blocks that are ever asked for: the working set. Ids lie below it."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.inputs.sum())

    def request(self, i: int) -> Ints:
        """The blocks that request `i` asks for, as a view."""
        return self.ids[self.starts[i] : self.starts[i + 1]]

    def ceiling(self) -> Ints:
        """Prompt tokens of each request that a cache without bounds would have: the leading run of blocks that an
        earlier request asked for, at most the request's `inputs`.

        Its sum over `input_tokens` is the highest hit ratio that any policy can reach on this trace."""
        # Chained ids: behind a block that is new all are new, so those seen before are the leading run. An id is new
        # where it exceeds all before it, since ids are numbered by first appearance.
        highest = np.maximum.accumulate(self.ids)
        new = np.ones(len(self.ids), np.int64)
        new[1:] = highest[1:] > highest[:-1]
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])
        fresh = before[self.starts[1:]] - before[self.starts[:-1]]
        known: Ints = (np.diff(self.starts) - fresh) * self.block_tokens
        return np.minimum(known, self.inputs)
