"""Overlaid conversations: each keeps its own clock, and its start is drawn.

For recorded conversations whose absolute times are not known, and for those that the generator draws. Times are real
inside a conversation only; results give the number of open conversations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.simulate.traces.trace import Floats

DEFAULT_OPEN = 64


def starts(clocks: Sequence[Floats], open_: int, rng: np.random.Generator) -> Floats:
    """Start of each conversation, in seconds: increasing, uniform over a span in which `open_` of them are open on
    average. `clocks`: times of each one's requests since its first."""
    span = sum(float(clock[-1]) for clock in clocks) / open_
    return np.sort(rng.uniform(0, span, len(clocks)))
