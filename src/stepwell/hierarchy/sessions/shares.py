"""Shares of tenants in anything that is bounded, so that none of them takes it all: half is set aside for them in equal
parts, the other half goes to those that come first.

Also the bound on bytes of questions that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stepwell.hierarchy.sessions.session import Session

MAX_HELD = 512 << 20
"""Bytes of digests that wait in a well, for an answer or to be recalled, with a little for each message."""

MAX_HELD_BY_ONE = 128 << 20
"""The same for one session: some 2,000 prompts of 2,000 blocks each."""

OVERHEAD = 1 << 10
"""Bytes that a message costs while it waits, whatever it says."""


class Shares:
    """`tenants`: how many there are."""

    def __init__(self, tenants: int) -> None:
        self._tenants = max(1, tenants)

    def has_room(self, most: int, taken: Mapping[str, int], tenant: str, wanted: int = 1) -> bool:
        """True if `tenant` may have `wanted` more. `most`: what there is; `taken`: how much each tenant has."""
        own = most // (2 * self._tenants)
        others = sum(min(own, n) for name, n in taken.items() if name != tenant)
        set_aside = max(0, (self._tenants - 1) * own - others)
        return sum(taken.values()) + wanted + set_aside <= most


class Held:
    """Bytes of sessions' messages that wait in the well."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.by_tenant: Counter[str] = Counter()

    def take(self, session: Session, nbytes: int) -> bool:
        """False: it is more than may wait."""
        nbytes += OVERHEAD
        if session.held_bytes + nbytes > MAX_HELD_BY_ONE:
            return False
        if not self._shares.has_room(MAX_HELD, self.by_tenant, session.tenant, nbytes):
            return False
        self._add(session, nbytes)
        return True

    def give(self, session: Session, nbytes: int) -> None:
        """Gives back what was taken for as many bytes."""
        self._add(session, -nbytes - OVERHEAD)

    def _add(self, session: Session, nbytes: int) -> None:
        session.held_bytes += nbytes
        self.by_tenant[session.tenant] += nbytes
        if not self.by_tenant[session.tenant]:
            del self.by_tenant[session.tenant]
