"""Messages between the two halves: a plan per step to the workers, a report per step back. Both may be pickled. And the
sizes of what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from stepwell.block.groups import GroupKind, GroupRule, Part, parts_of
from stepwell.client.streams import StreamLimits


@dataclass(frozen=True)
class Shape:
    """page: tokens in an engine page. block_tokens: a multiple of it. shard_bytes: of one rank's part of a shard.
    replicas: consecutive ranks, of `world`, that hold the same part (MLA, KV heads that are fewer than ranks). groups:
    rules of the engine's cache groups; where none are given there is one, which needs every token. recomputed: tokens
    at the end of a prefix, a multiple of every group's page, that are computed again although they were found: a
    drafter's KV of them may be another request's."""

    page: int
    block_tokens: int
    shard_bytes: int
    world: int
    replicas: int = 1
    groups: tuple[GroupRule, ...] = ()
    recomputed: int = 0

    @cached_property
    def rules(self) -> tuple[GroupRule, ...]:
        return self.groups or (GroupRule(GroupKind.FULL, self.page),)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts of a block."""
        return parts_of(self.rules, self.block_tokens)

    @cached_property
    def prefix(self) -> tuple[Part, ...]:
        """Parts of a block that are needed wherever behind it a request goes on."""
        return tuple(part for part in self.parts if self.rules[part.group].kind is GroupKind.FULL)

    @cached_property
    def tail(self) -> tuple[Part, ...]:
        """Parts that are needed close behind it only."""
        return tuple(part for part in self.parts if part not in self.prefix)

    @property
    def by_request(self) -> bool:
        """A recall is whole or nothing: of several groups an engine is told which requests' loads have failed, and not
        which pages."""
        return len(self.rules) > 1

    @property
    def stored_tokens(self) -> int:
        """Tokens for which a stored block counts where the well weighs it: a block has as many as its prefix has parts,
        so these are too few where it cannot be divided."""
        return max(1, self.block_tokens // len(self.prefix))

    @property
    def shards(self) -> int:
        """Parts of a stored block, each once."""
        return self.world // self.replicas

    @property
    def block_bytes(self) -> int:
        return self.shard_bytes * self.shards

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV, in groups that need every token."""
        return self.block_bytes * len(self.prefix) // self.block_tokens

    def tokens(self, stored: int) -> int:
        """Tokens for which so many stored blocks of a prefix count, in groups that need every token."""
        return stored * self.block_tokens // len(self.prefix)

    def resumed(self, stored: int, tokens: int) -> int:
        """Of a request of so many tokens, how many it need not compute that has so many stored blocks of its prefix.
        One of them is computed in any case; with drafts the last page in which they could all have been found."""
        found = self.tokens(stored)
        if not self.recomputed:
            return min(found, tokens)
        return max(0, min(found, (tokens - 1) // self.recomputed * self.recomputed) - self.recomputed)

    def place(self, number: int) -> tuple[int, Part]:
        """The block and part of the stored block of this number in a prefix."""
        block, part = divmod(number, len(self.prefix))
        return block, self.prefix[part]

    def places(self, first: int, end: int) -> list[tuple[int, Part]]:
        """The same for those from `first` up to `end`."""
        if len(self.prefix) == 1:
            part = self.prefix[0]
            return [(number, part) for number in range(first, end)]
        return [self.place(number) for number in range(first, end)]


Ref = tuple[int, int, int]
"""(slab, slot, generation) of one shard."""

LoadBlock = tuple[Sequence[Ref], int, Sequence[int]]
"""A stored block's refs by shard, the pages of it that are left out, and the engine's pages that get the others."""


@dataclass(slots=True)
class Load:
    """Recall into a request's pages. `blocks` holds, per stored block, its refs by shard, how many of its first pages
    are not wanted (the engine has them, or needs them no more) and the pages to fill.

    A worker of another session than `session` fails the load: what refs and transfers mean ends with it. With `limits`
    it is a stream: no refs are known yet, the well says them as blocks land. `also`: a second transfer, of the last of
    these blocks, that ends with it; 0: there is none.
    """

    request: str
    session: int
    transfer: int
    blocks: list[LoadBlock]
    limits: StreamLimits | None = None
    also: int = 0

    @property
    def transfers(self) -> list[int]:
        return [self.transfer, self.also] if self.also else [self.transfer]


@dataclass(slots=True)
class Save:
    """Spill one block: its lease in `session`, its refs by shard, the pages of cache group `group` to read. Of ranks
    that hold the same, one does."""

    session: int
    lease: int
    refs: list[Ref]
    pages: Sequence[int]
    group: int = 0


@dataclass(slots=True)
class Compare:
    """A canary: stored blocks beside the pages that the request has computed itself; per block, its refs by shard, its
    pages and the cache group that these are of. Without blocks nothing is compared any more. Either way `transfer` is
    acknowledged: its lease ends."""

    session: int
    transfer: int
    blocks: list[tuple[Sequence[Ref], Sequence[int], int]]


@dataclass
class StepPlan:
    """Scheduler to workers, once per step.

    urgent: saves from pages that the engine has taken back; only before this step's forward.
    saves, compares: from pages that stay as they are during this step.
    unwanted: transfers of streams whose requests have ended: no more of their blocks are to be copied.
    fresh: pages that were taken for this step or may be written by it for the first time, for copies beside it.
    naps: how often the scheduler knows the engine to have slept. Pages of earlier times hold nothing any more.
    any_page: which ones these are is not known.
    """

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    urgent: list[Save] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    compares: list[Compare] = field(default_factory=list)
    unwanted: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    naps: int = 0
    any_page: bool = False


@dataclass
class StepReport:
    """Workers to scheduler, once per step; aggregated over ranks.

    done: how many ranks ended the step without an exception. failed: (request, transfer, first bad block) of loads;
    loaded: (request, transfer, seconds of copying). short: (request, transfer, blocks that came, why not more, seconds
    of copying) of streams whose other blocks have not come, and are as good as they were. recalled_bytes,
    spilled_bytes: copied, by all ranks together. compared: (rank, transfer, errors) of canaries, no errors where
    nothing was compared. seconds: of each step's forward, on the slowest rank. naps: how often the engine has slept.
    """

    done: dict[int, int] = field(default_factory=dict)
    failed: list[tuple[str, int, int]] = field(default_factory=list)
    loaded: list[tuple[str, int, float]] = field(default_factory=list)
    short: list[tuple[str, int, int, str, float]] = field(default_factory=list)
    recalled_bytes: int = 0
    spilled_bytes: int = 0
    compared: list[tuple[int, int, list[float]]] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    naps: int = 0

    @property
    def ended(self) -> list[tuple[str, int]]:
        """Request and transfer of each load that a rank has ended, well or not."""
        return [end[:2] for end in self.failed] + [end[:2] for end in self.loaded] + [end[:2] for end in self.short]

    def aggregate(self, other: StepReport) -> Self:
        done = {step: self.done.get(step, 0) + other.done.get(step, 0) for step in {*self.done, *other.done}}
        return type(self)(
            done,
            self.failed + other.failed,
            self.loaded + other.loaded,
            self.short + other.short,
            self.recalled_bytes + other.recalled_bytes,
            self.spilled_bytes + other.spilled_bytes,
            self.compared + other.compared,
            {s: max(self.seconds.get(s, 0.0), other.seconds.get(s, 0.0)) for s in {*self.seconds, *other.seconds}},
            max(self.naps, other.naps),
        )
