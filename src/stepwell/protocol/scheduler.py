"""What an engine's scheduler member says: it asks, reserves and gives back."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stepwell.protocol.base import Message, Numbers
from stepwell.protocol.limits import MAX_COUNTS, MAX_GROUPS, MAX_TIMINGS


class NoPlace(msgspec.Struct, frozen=True, array_like=True):
    """Why a request does not go on where its prefix ends: it needs a window or a state there, too. The prefix reaches
    over `blocks`; of these the last `places` were looked at, and `tried` of them asked for. `missing`: of each cache
    group, by its number in `Hello.groups`, at how many places something of it was not there."""

    blocks: int
    places: int
    tried: int
    missing: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_GROUPS)]


class Ask(Message, frozen=True):
    """Which leading run of these consecutive blocks can be recalled? Hits are pinned until Recall or Release.

    `ticket` is a number the client never uses twice in a session. `order` is the request's place in the engine's queue:
    those below 0 were preempted and go first, and a larger one may be asked to give way to a smaller one. `tokens`: of
    the whole prompt, 0 where that is not said. `recall`: "auto", "always" or "never", where the request has a wish of
    its own. `prefix`: the ticket of the request's prefix, where these blocks are parts of its tail (a window, a state);
    0: they are none. Answered by one or more `Found`.
    """

    ticket: int
    epoch: int
    order: int
    digests: bytes
    tokens: int = 0
    recall: str = ""
    prefix: int = 0


class Look(Message, frozen=True):
    """Which of these blocks are there? Nothing is pinned, promoted or noted as used. `ticket`: see `Ask`. Answered by
    one `Seen`; for wells with the flag `LOOKS` only."""

    ticket: int
    epoch: int
    digests: bytes


class Recall(Message, frozen=True):
    """Turn the pins of blocks [first, first + count) of a ticket into a lease until every rank said `Recalled`.
    `compare`: they are only looked at, beside what the engine computes itself. `waited_s`: how long the request was
    kept waiting for them. `streamed`: some of them may still lie below host memory (up to `Found.known`). All of them
    go to the workers in `Landed`, as they land, and the lease of each ends when all ranks said `BlocksCopied`.
    `no_place`: why these are not more, where it is for want of a place to go on. `spare`: so many blocks behind these
    were found and are not needed, since the engine computes the end of what is found again."""

    ticket: int
    transfer: int
    first: int
    count: int
    compare: bool = False
    waited_s: float = 0.0
    streamed: bool = False
    no_place: NoPlace | None = None
    spare: int = 0


class Release(Message, frozen=True):
    """The request needs this ticket no more: pins end. Leases of a transfer under way do not. `waited_s`: how long it
    was kept waiting in vain; 0: it never asked, or the engine had it all. `waits`: the answer to GiveWay; the ticket is
    still needed, and its blocks are told anew, from the first one on. `no_place`: see `Recall`."""

    ticket: int
    waited_s: float = 0.0
    waits: bool = False
    no_place: NoPlace | None = None


class Reserve(Message, frozen=True):
    """Lease slots to fill these consecutive blocks (the first one's parent is `parent`, empty at the chain's start).
    `first`: how many blocks come before them, -1 where that is not said. `depth`: of parts of a tail, which have no
    parent, the blocks of the prefix before them, for what computing it again would take."""

    spill: int
    epoch: int
    parent: bytes
    digests: bytes
    first: int = -1
    depth: int = 0


class Abandon(Message, frozen=True):
    """Reserved blocks that no worker was told to fill: their slots are free at once."""

    leases: Numbers


class Forget(Message, frozen=True):
    """These blocks failed their check while being recalled: drop them."""

    epoch: int
    digests: bytes


class Canary(Message, frozen=True):
    """How far blocks that the engine computed itself are from those stored under the same digests: the relative error
    ||computed - stored|| / ||stored|| of each layer's K and V, all ranks' in order, the worst of the blocks. `kind`:
    the numbers that they are made of ("bfloat16")."""

    epoch: int
    kind: str
    errors: list[float]


class Report(Message, frozen=True):
    """Counts since the last report of what only the engine side sees (bypasses, late answers, ...)."""

    counts: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_COUNTS)]


class Timings(Message, frozen=True):
    """How long the engine's steps and copies took since the last of these. A step: tokens that it computed for prompts,
    the pairs of them and the tokens before them that attention looked at, seconds. A copy out of the arena: bytes of
    its blocks, seconds."""

    steps: Annotated[list[tuple[int, float, float]], msgspec.Meta(max_length=MAX_TIMINGS)]
    copies: Annotated[list[tuple[int, float]], msgspec.Meta(max_length=MAX_TIMINGS)]
