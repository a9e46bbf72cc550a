"""Dice that differ from run to run, and what a failure must say so that it can be tried again."""

from __future__ import annotations

import random

from lab.trust.budget import Budget
from lab.trust.kills.lanes import Tally


def budget() -> Budget:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    return Budget(seed, tell=print)


def clean(tally: Tally) -> Tally:
    """The tally, which has no violation."""
    assert not tally.evidence, dict(tally.evidence)
    assert tally.n["right"], "something was recalled and compared"
    return tally
