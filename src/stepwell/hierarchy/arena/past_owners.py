"""Memory of owners that have neither an engine nor a slab any more: an engine that is started again within minutes
finds its policy as it was.

Every start of an engine without weight files is an owner of its own, and most owners never come back. So there is one
bound on what the pasts of all owners remember together, and those that have gone pay first, the earliest before others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from stepwell.hierarchy.arena.records import Owner
from stepwell.hierarchy.arena.residents import MAX_REMEMBERED, Residents
from stepwell.policies.past import MIN_REMEMBERED, PastTally

MAX_PAST_OWNERS: Final = 64
"""Largest number of owners that have gone and are remembered."""

A_FEW: Final = 64
"""Blocks that are forgotten at a time, in some 0.1 ms: more than are asked for at a time."""

_BYTES, _SHARE = 300, 64


def most_of_all(host_bytes: int) -> int:
    """Blocks that all owners together remember beside a `host` tier of this size: what costs a 64th of it, and at least
    as many as the smallest owner alone may (some 20 MB)."""
    return max(MIN_REMEMBERED, min(MAX_REMEMBERED, host_bytes // _SHARE // _BYTES))


class PastOwners:
    """`tally` counts what is remembered of all owners."""

    def __init__(self, host_bytes: int, tally: PastTally) -> None:
        self.most = most_of_all(host_bytes)
        self._tally = tally
        self._owners: OrderedDict[Owner, Residents] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def items(self) -> Iterator[tuple[Owner, Residents]]:
        yield from self._owners.items()

    def add(self, owner: Owner, residents: Residents) -> None:
        """Adds an owner that has gone and holds nothing."""
        if residents.remembered:
            self._owners[owner] = residents

    def back(self, owner: Owner) -> Residents | None:
        """Takes out what is remembered of an owner that is here again; None if that is forgotten."""
        return self._owners.pop(owner, None)

    @property
    def full(self) -> bool:
        """More is remembered of all owners together than may be."""
        return self._tally.blocks > self.most

    @property
    def too_many(self) -> bool:
        """`forget` is to be called, now and then."""
        return len(self._owners) > MAX_PAST_OWNERS

    def forget(self) -> bool:
        """Forgets a few blocks of the owner that went first; False if there is none."""
        owner = next(iter(self._owners), None)
        if owner is None:
            return False
        residents = self._owners[owner]
        residents.forget(A_FEW)
        if not residents.remembered:
            del self._owners[owner]
        return True
