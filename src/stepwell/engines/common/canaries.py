"""The canary: of so many prefixes that could be recalled, one is left to the engine, and what it computes is compared
with what is stored.

    matched: not offered -> allocated: a few blocks leased -> computed and confirmed -> compared by the workers
                                                                                    -> the well is told the errors

This catches what a fingerprint cannot: weights that are not those of their name. The well judges, because it knows what
other engines of the namespace have seen (`stepwell.hierarchy.sessions.canaries`); here errors are made and no more. A
canary costs its request the recall that it did not get, and nothing else: one that does not end well is one less.

`Canaries` are those of one engine, as its scheduler half has them: which prefixes they are, what is leased for them,
and what the workers found. Everything is bounded, and each lease is ended by the workers, compared or not.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.plan import Compare, Shape
from stepwell.engines.common.requests import CanaryLease, Tracked
from stepwell.engines.common.tasks import Handover
from stepwell.engines.paged.compare import KINDS

EVERY = 1000
"""Number of prefixes that could be recalled, of which one is a canary, by default."""

MAX_BLOCKS, MAX_BYTES = 4, 4 << 20
"""Most blocks that a canary leases while its request computes them, and their bytes on one rank (one block at
least)."""

STEP_BYTES = 8 << 20
"""Bytes of one rank that a step compares, but one canary at least: some 10 ms."""

MAX_OPEN = 256
"""Canaries that workers were given and have not answered for; beyond that the earliest are given up."""


def kind_of(dtype: Any) -> str | None:
    """Name of a torch dtype in KINDS; None if its numbers cannot be compared."""
    name = str(dtype).removeprefix("torch.")
    return name if name in KINDS else None


@dataclass(slots=True)
class _Open:
    """A canary that is being compared: errors by rank, as they come."""

    session: int
    epoch: int
    errors: dict[int, list[float]] = field(default_factory=dict)


class Canaries:
    """`every`: of so many prefixes one is a canary; 0: none. `kind`: numbers of the KV, as `kind_of` says. `apart`:
    cache groups of which nothing is compared, as those of a drafter."""

    def __init__(
        self,
        shape: Shape,
        client: SchedulerClient,
        every: int = 0,
        kind: str | None = None,
        apart: Collection[int] = (),
    ) -> None:
        self._shape = shape
        self._client = client
        self._apart = apart
        self._every = every if kind is not None else 0
        self._kind = kind or ""
        self._prefixes = 0
        self._open: dict[int, _Open] = {}
        self._given_up: Handover[list[Compare]] = Handover(list)

    def takes(self, tracked: Tracked, computed: int, blocks: int) -> bool:
        """Whether this prefix, of which the engine has `computed` tokens and the well `blocks` blocks, is left to
        be computed. Decided once for an ask, however often the engine asks. Counted rather than drawn: the cost is what
        was promised, and a test of a few recalls has none."""
        if not self._every or self._first(computed) >= blocks:
            return False
        if tracked.canary is None:
            self._prefixes += 1
            tracked.canary = self._prefixes % self._every == 0
        return tracked.canary

    def _first(self, computed: int) -> int:
        """The first stored block that the engine computes from its first token on."""
        return -(-computed // self._shape.block_tokens) * len(self._shape.prefix)

    def begins(self, tracked: Tracked) -> bool:
        """Its pages are allocated, for it to compute. If it is a canary: leases a stretch of the blocks that were not
        offered, any of which may be the wrong one, and ends the ask."""
        ask, first = tracked.ask, self._first(tracked.offered_from)
        blocks = ask.blocks if ask is not None else 0  # once: none any more where the well is lost at this moment
        if ask is None or not tracked.canary or first >= blocks:
            return False
        most = max(1, min(MAX_BLOCKS, MAX_BYTES // self._shape.shard_bytes, blocks - first))
        starts = [at for at in range(first, blocks - most + 1) if self._compares(at, most)]
        if not starts:
            return False
        at = random.choice(starts)
        tracked.canary_lease = lease = CanaryLease(ask.session, 0, at, [])
        lease.transfer, refs = self._client.recall(ask, at, most, compare=True)
        tracked.ask = None
        lease.refs = refs.tolist()
        tokens = self._shape.resumed(blocks, tracked.request.num_tokens) - tracked.offered_from
        tracked.canary_tokens += tokens
        self._client.count("canaries")
        self._client.count("canary_tokens", tokens)
        return True

    def _compares(self, first: int, blocks: int) -> bool:
        """One of these stored blocks is of a group in which the model has layers."""
        return any(self._shape.place(first + n)[1].group not in self._apart for n in range(blocks))

    def ready(self, tracked: Tracked) -> Compare | None:
        """The comparison that workers make in this step, if the request's blocks are computed and confirmed. The caller
        takes the lease from the request when it has planned that."""
        lease = tracked.canary_lease
        if lease is None or not self._covers(lease, tracked.confirmed):
            return None
        places = [self._shape.place(number) for number in range(lease.first, lease.end)]
        self._open[lease.transfer] = _Open(lease.session, tracked.epoch)
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        blocks = zip(lease.refs, places, strict=True)
        return Compare(
            lease.session,
            lease.transfer,
            [(refs, tracked.pages(place, self._shape), place[1].group) for refs, place in blocks],
        )

    def foresees(self, tracked: Tracked, after: int) -> None:
        """Takes note that a step is planned after which the request has `after` tokens."""
        if tracked.canary_lease is not None:
            tracked.canary_lease.covered = self._covers(tracked.canary_lease, after)

    def _covers(self, lease: CanaryLease, tokens: int) -> bool:
        """All of its blocks are among the first `tokens` tokens."""
        return (self._shape.place(lease.end - 1)[0] + 1) * self._shape.block_tokens <= tokens

    def cost(self, compare: Compare) -> int:
        """Bytes that one rank compares."""
        return len(compare.blocks) * self._shape.shard_bytes

    def give_up(self, tracked: Tracked) -> None:
        """Ends the lease: its pages are the engine's again, or will not be computed. Idempotent."""
        lease = tracked.canary_lease
        if lease is not None:
            self._given_up.now.append(Compare(lease.session, lease.transfer, []))
            tracked.canary_lease = None

    def take_given_up(self) -> list[Compare]:
        return self._given_up.take()

    @property
    def waits(self) -> bool:
        """Whether workers still have to learn that a lease ends."""
        return bool(self._given_up.now)

    def compared(self, rank: int, transfer: int, errors: list[float]) -> None:
        """One rank's result. With the last one's the well is told; one that failed anywhere is no canary."""
        known = self._open.get(transfer)
        if known is None:
            return
        known.errors[rank] = errors
        if len(known.errors) < self._shape.world:
            return
        del self._open[transfer]
        if all(known.errors.values()):
            self._client.canary(known.session, known.epoch, self._kind, _in_order(known.errors))

    def reset(self) -> None:
        """Forgets comparisons under way: the weights may have changed."""
        self._open.clear()


def _in_order(errors: Mapping[int, list[float]]) -> list[float]:
    return [error for rank in sorted(errors) for error in errors[rank]]
