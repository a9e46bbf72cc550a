"""Block ids from lengths alone: which leading blocks a request shares with the former one of its conversation."""

from __future__ import annotations

import numpy as np

from stepwell.simulate.traces.chains import Blocks, room_for, starts_of
from stepwell.simulate.traces.trace import Ints


def grown(inputs: Ints, sessions: Ints, shared: Ints, block_tokens: int) -> Blocks:
    """The full blocks of requests that stand in the order of their times.

    `shared` are the leading tokens that a request has in common with the former one of its session, or, where there is
    none, with the prefix that all such requests begin with; -1 if unknown: then the whole former prompt, or nothing. It
    counts at most as long as both prompts. All else is new.
    """
    full = inputs // block_tokens
    starts = starts_of(full)
    room_for(int(starts[-1]))
    ids = np.arange(starts[-1])  # a block that is new is named by its own place
    former: dict[int, int] = {}  # session -> its last request
    prefix, prefix_blocks = 0, 0  # where ids of the common prefix stand, and how many are known
    some = np.flatnonzero((sessions >= 0) | (shared > 0)).tolist()
    for i in some:
        session, tokens, start = int(sessions[i]), int(shared[i]), int(starts[i])
        if session in former:
            last = former[session]
            common = min(int(inputs[i]), int(inputs[last]))
            keep = (common if tokens < 0 else min(common, tokens)) // block_tokens
            ids[start : start + keep] = ids[starts[last] : starts[last] + keep]
        else:
            wanted = min(max(tokens, 0), int(inputs[i])) // block_tokens
            keep = min(wanted, prefix_blocks)
            ids[start : start + keep] = ids[prefix : prefix + keep]
            if wanted > prefix_blocks:
                prefix, prefix_blocks = start, wanted
        if session >= 0:
            former[session] = i
    return Blocks(starts, ids)
