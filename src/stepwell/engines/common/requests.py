"""State that the scheduler half keeps of each live request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.block.digest import Chain
from stepwell.block.groups import Part
from stepwell.block.tier import HOST
from stepwell.client.questions import BlocksQuestion, PrefixQuestion, Spill
from stepwell.engines.common.adapters import Adapter
from stepwell.engines.common.plan import Load, Ref, Save, Shape

Place = tuple[int, Part]
"""A block of a request, and a part of it."""


@dataclass(slots=True, eq=False)
class PendingSpill:
    """Reserved blocks of a request that are yet to be copied: one for each of `places`. `first`: the number of the
    first of them in the request's prefix; -1: they are parts of its tail."""

    first: int
    places: Sequence[Place]
    spill: Spill
    next: int = 0  # blocks of it that are dealt with

    @property
    def settled(self) -> bool:
        return self.next == self.spill.blocks

    @property
    def left(self) -> Sequence[Place]:
        return self.places[self.next : self.spill.blocks]


@dataclass(slots=True, eq=False)
class Loading:
    """A recall on its way into a request's pages: tokens [start, start + tokens), from stored block `first` of the
    prefix on, and then those of `tail`. `good` is how many of its blocks arrived on all ranks that have reported. Of a
    stream, `ranks` are still to report, `ends` is why no more was offered, and `late` why not all of it has come."""

    load: Load
    first: int
    start: int
    tokens: int
    good: int
    tail: Sequence[Place] = ()
    sources: bytes = b""  # of each block: the place of the tier that it was promoted from for this request; 0: host
    seconds: float = 0.0  # since the scheduler's first ask, when the last rank reported
    copy_s: float = 0.0  # of the slowest rank
    ranks: int = 0
    ends: str = ""
    late: str = ""

    @property
    def whole(self) -> bool:
        return self.good == len(self.load.blocks)

    def by_tier(self, tokens: int, up_to: Callable[[int], int], tiers: Sequence[str]) -> dict[str, int]:
        """Number of its first `tokens` tokens by the tier that their blocks were in when the request asked for them.
        `up_to`: tokens of so many stored blocks. `tiers`: names by place. Blocks of no known tier count as host
        memory's, from which they were copied."""
        end, found = self.start + tokens, {HOST: 0}
        for block, source in enumerate(self.sources, self.first):
            low, high = max(self.start, up_to(block)), min(end, up_to(block + 1))
            if high > low:
                tier = tiers[source] if source < len(tiers) else HOST
                found[tier] = found.get(tier, 0) + high - low
        return found


@dataclass(slots=True, eq=False)
class CanaryLease:
    """A canary: stored blocks of the prefix from `first` on are leased by `transfer`, `refs` by block and rank, to be
    compared with what the request computes. `covered`: a step that completes them all is under way or has ended."""

    session: int
    transfer: int
    first: int
    refs: list[list[Ref]]
    covered: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.refs)


@dataclass(slots=True, eq=False)
class TailSearch:
    """The search for the place behind which one request can go on. `looked`: parts of tails that are looked for, and
    `here` those that are there. `reach`: of the prefix, in blocks. `tried`: the place that is asked for, `places` its
    tail behind the `computed` tokens that the engine has, and `ask` the question for it. `blocks`: the place that was
    found, 0 if none was; -1: it is not known yet."""

    look: BlocksQuestion | None = None
    looked: list[Place] = field(default_factory=list)
    here: frozenset[Place] | None = None
    reach: int = -1
    tried: int = 0
    places: list[Place] = field(default_factory=list)
    ask: PrefixQuestion | None = None
    computed: int = 0
    tries: int = 0
    since: float = 0.0
    blocks: int = -1


@dataclass(slots=True, eq=False)
class Tracked:
    """One request. Tokens of its sequence, half-open ranges:

    0 ---- KV in pages, step confirmed ---- confirmed ---- in a step under way ---- planned
    0 ---- stored block is in the well or was offered to it ---- `known` of them

    `tables` has its pages by cache group; those behind which a window has moved are the engine's again. Of its tail,
    blocks before `tail_known` were offered or are not wanted.

    `chain` is None for requests that bypass stepwell. `life` is another number after each restart: a step that was
    planned in an earlier life confirms nothing.
    """

    request: Any
    order: int
    chain: Chain | None
    epoch: int
    life: int
    adapter: Adapter | None = None
    ask: PrefixQuestion | None = None
    answer: PrefixQuestion | None = None  # of an ask that is finished: its blocks need not be offered to the well
    asked: bool = False  # the scheduler has asked since the last (re)start of the request
    streams: bool = False  # what was offered of this ask may not have landed yet
    offered_from: int = 0
    spare: int = 0  # stored blocks behind what was offered, which were found and are computed again
    canary: bool | None = None  # whether its prefix is left to be recomputed; None: not decided for this ask
    canary_lease: CanaryLease | None = None
    loading: Loading | None = None  # until the request is scheduled again
    failed: bool = False  # its load has; it is not offered another before it has been scheduled
    search: TailSearch | None = None  # for the parts of the tail that go with this ask
    tables: list[list[int]] = field(default_factory=list)
    known: int = 0
    tail_known: int = 0
    ends: tuple[int, int] = (0, 0)  # tokens with which the last two steps end, one under way included
    parting: int = 0  # blocks of a prefix that the well has, without the tail that goes with it
    confirmed: int = 0
    admitted: bool = False  # scheduled since its last (re)start
    pending: list[PendingSpill] = field(default_factory=list)
    mute: bool = False  # no spills any more: it has KV of other weights, or on top of what failed to load
    ended_at: float = 0.0
    asked_at: float = 0.0
    offered_at: float = 0.0
    canary_tokens: int = 0  # could have been recalled, and were left to be recomputed
    recalled_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=lambda: {HOST: 0})  # the same, by where they were
    wait_s: float = 0.0  # from the scheduler's first ask to the offer, and then part of recall_s, or to a miss
    copy_s: float = 0.0
    recall_s: float = 0.0

    def receipt(self, token_bytes: int) -> dict[str, Any]:
        """The request's account for its user, in the response's `kv_transfer_params`. `token_bytes`: bytes of a token's
        KV on all ranks."""
        canary = {"canary_tokens": self.canary_tokens} if self.canary_tokens else {}
        return canary | {
            "recalled_tokens": self.recalled_tokens,
            "tiers": dict(self.tiers),
            "bytes": {tier: tokens * token_bytes for tier, tokens in self.tiers.items()},
            "recall_ms": round(1e3 * self.recall_s, 3),
            "wait_ms": round(1e3 * self.wait_s, 3),
            "copy_ms": round(1e3 * self.copy_s, 3),
        }

    def pages(self, place: Place, shape: Shape) -> Sequence[int]:
        block, part = place
        return part.of_table(self.tables[part.group], block, shape.block_tokens)

    def unsaved(self, shape: Shape) -> Iterator[int]:
        """Pages that are yet to be copied or compared. The last page of a request is none of them: it is not full."""
        for pending in self.pending:
            for place in pending.left:
                yield from self.pages(place, shape)
        if (lease := self.canary_lease) is not None:
            for number in range(lease.first, lease.end):
                yield from self.pages(shape.place(number), shape)

    def give_back(self, pending: PendingSpill, left: int) -> None:
        """Of these blocks, those behind the first `left` were not saved: they may be offered again."""
        if pending.first >= 0:
            self.known = min(self.known, pending.first + left)
        elif left < len(pending.places):
            self.tail_known = min(self.tail_known, pending.places[left][0])

    def _awaits_before(self, pending: PendingSpill) -> bool:
        """Blocks before these are yet to be filled, or to get slots: what did not find its parent may find it then."""
        return any(0 <= other.first < pending.first and not other.settled for other in self.pending)

    def ready(self, shape: Shape) -> Iterator[Save]:
        """Saves whose slots are leased and whose step is confirmed; each is yielded once."""
        for pending in self.pending:
            spill = pending.spill
            if not spill.granted or (spill.refs is None and any(spill.leases)):
                continue
            if spill.reason in ("no_room", "no_parent") and (any(spill.leases) or self._awaits_before(pending)):
                self.give_back(pending, spill.cut())  # the rest is asked for again
            row = sum(1 for lease in spill.leases[: pending.next] if lease)
            while not pending.settled:
                place = pending.places[pending.next]
                if (place[0] + 1) * shape.block_tokens > self.confirmed:
                    break
                pages, lease = self.pages(place, shape), spill.leases[pending.next]
                pending.next += 1
                if lease:
                    assert spill.refs is not None
                    refs = spill.refs[row].tolist()  # tuples of Python's own integers
                    row += 1
                    yield Save(spill.session, lease, refs, pages, place[1].group)
        self.pending = [p for p in self.pending if not p.settled]
