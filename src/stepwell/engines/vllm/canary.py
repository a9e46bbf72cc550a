"""The canary: of so many prefixes that could be recalled, one is left to the engine, and what it computes is compared
with what is stored.

    matched: not offered -> allocated: a few blocks leased -> computed and confirmed -> compared by the workers
                                                                                    -> the well is told the errors

This catches what a fingerprint cannot: weights that are not those of their name. The well judges, because it knows what
other engines of the namespace have seen (`stepwell.hierarchy.sessions.canaries`); here errors are made and no more. A
canary costs its request the recall that it did not get, and nothing else: one that does not end well is one less.
"""

from __future__ import annotations

from typing import Any

from stepwell.engines.paged.compare import KINDS

EVERY = 1000
"""Prefixes that could be recalled, of which one is a canary, if nothing else is said."""


def kind_of(dtype: Any) -> str | None:
    """What a torch dtype is called in KINDS; None: it cannot be compared."""
    name = str(dtype).removeprefix("torch.")
    return name if name in KINDS else None
