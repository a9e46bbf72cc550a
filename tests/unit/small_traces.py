"""Small traces, written by hand or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from stepwell.policies.costs.prefill import PrefillCost
from stepwell.simulate.traces.assemble import Columns, assemble
from stepwell.simulate.traces.chains import Blocks, starts_of
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace

BLOCK = 16

COST = PrefillCost(step_s=0.0, token_s=1e-3, pair_s=1e-5)
"""Late blocks cost more: the tenth some times as much as the first."""


def seconds(first: int, last: int) -> float:
    """Prefill seconds of prompt tokens [first, last), as a replay wants to know them."""
    return COST.seconds(last - first, first)


def trace_of(prompts: Sequence[Sequence[int] | str], gaps: Sequence[float] = (), name: str = "small") -> Trace:
    """Each prompt by its blocks: letters or numbers, equal where the text is. `gaps` between requests: 1 s if not
    given."""
    spelt = [[ord(block) if isinstance(block, str) else block for block in prompt] for prompt in prompts]
    counts = np.array([len(prompt) for prompt in spelt], np.int64)
    times = np.cumsum(np.array([0.0, *gaps, *[1.0] * len(spelt)][: len(spelt)]))
    unknown = np.full(len(spelt), -1, np.int64)
    columns = Columns(times, counts * BLOCK, np.zeros(len(spelt), np.int64), unknown)
    ids = np.array([block for prompt in spelt for block in prompt], np.int64)
    return assemble(name, BLOCK, columns, Blocks(starts_of(counts), ids), Problems(name))


def traces(requests: int = 30, blocks: int = 8, letters: int = 3) -> st.SearchStrategy[Trace]:
    """Prompts of few letters share prefixes, end in the middle of others and are asked for again; some come at the same
    moment."""
    prompts = st.lists(st.lists(st.integers(0, letters - 1), max_size=blocks), min_size=1, max_size=requests)
    gaps = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0, 300.0]), max_size=requests)
    return st.builds(trace_of, prompts, gaps)
