"""Every message that crosses the socket, as msgspec structs (arrays on the wire, tagged by class name).

An engine is one *session*: a scheduler member and one worker member per rank. The scheduler asks, reserves and gives
back; workers copy and acknowledge. Blocks travel as digests (never stored, never logged) and come back as slot
references. Nothing here does I/O.

What an engine may say at a time is bounded: by the decoder where it crosses the socket, and by `overlong` for those
that share a process with the well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from stepwell.block.tier import HOST

PROTOCOL = 4
"""Version spoken here. A well accepts this one and the one before it, whose workers keep nothing that is unmapped, and
whose ranks all have KV of their own."""

OLDEST_PROTOCOL = 3

UNNAMED_TIERS = (HOST, "disk")
"""What a well has whose `Welcome` names no tiers: it is of an older version."""
MAX_MESSAGE = 16 << 20
"""Largest message in bytes; a longer one ends the connection."""

MAX_DIGESTS = 1 << 18
"""Most digests in one Ask: 256 Ki blocks, far beyond any context."""

MOST_TIMINGS = 256
"""Steps in one Timings, and as many copies."""

MOST_LISTED = 4096
"""Leases, transfers or sessions in one list."""

MOST_COUNTS = 256
"""Names in one Report."""

MOST_ASKED = 32 * MAX_DIGESTS + (64 << 10)
"""Bytes of the longest message of a scheduler, an Ask."""

MOST_ACKNOWLEDGED = 128 << 10
"""Bytes of the longest message of a worker, a Filled."""

PIECE = 64
"""Numbers of a list that are handled before others get their turn."""

MOST_ALLOWED_S = 0.25
"""Most of `Found.allow_s`: a well says no more, and a client believes no more."""

SLOT_REF = np.dtype([("slab", "<u4"), ("slot", "<u4"), ("generation", "<u8")])
"""Where one shard of a block lies. Blocks come as C-ordered arrays of shape (blocks, shards)."""


Numbers = Annotated[list[int], msgspec.Meta(max_length=MOST_LISTED)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# engine -> well, first message of every connection ------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Who connects. A member passes a pidfd of itself as the message's only descriptor.

    `engine` is the same random name in all processes of one engine; `layout` is a 32-byte digest of how this member
    sees the KV layout; the scheduler adds `weights` and `model` (32-byte digests), `block_tokens` and, for people, a
    `label`. `wishes` are well settings that the engine's user asked for: a well that was started with others keeps its
    own and says so in `Welcome.warnings`. `acknowledges` are sessions of which nothing is left in this process: no
    copy, no slab. `pins`: a slab's pages stay in memory as long as this worker has it mapped, whatever the well does to
    them; it says `Unmapped` of each that was retired. `replicas`: so many consecutive ranks hold the same KV. It is one
    shard: rank r's is number r // replicas, of world // replicas, and the first rank that holds it writes it.
    """

    protocol: int
    role: str  # "scheduler" | "worker" | "admin"
    engine: str = ""
    rank: int = 0
    world: int = 1
    shard_bytes: int = 0
    layout: bytes = b""
    weights: bytes = b""
    model: bytes = b""
    block_tokens: int = 0
    label: str = ""
    wishes: dict[str, str | int | float] = {}
    acknowledges: Numbers = []
    pins: bool = False
    replicas: int = 1


# engine -> well, scheduler member -----------------------------------------------------------------------------------


class Ask(Message, frozen=True):
    """Which leading run of these consecutive blocks can be recalled? Hits are pinned until Recall or Release.

    `ticket` is a number the client never uses twice in a session. `order` is the request's place in the engine's queue:
    smaller goes first when pins are short. `tokens`: of the whole prompt, 0 where that is not said. `recall`:
    "default", "always" or "never", where the request has a wish of its own. Answered by one or more `Found`.
    """

    ticket: int
    epoch: int
    order: int
    digests: bytes
    tokens: int = 0
    recall: str = ""


class Recall(Message, frozen=True):
    """Turn the pins of blocks [first, first + count) of a ticket into a lease until every rank said `Recalled`.
    `compare`: they are only looked at, beside what the engine computes itself. `waited_s`: how long the request was
    kept waiting for them."""

    ticket: int
    transfer: int
    first: int
    count: int
    compare: bool = False
    waited_s: float = 0.0


class Release(Message, frozen=True):
    """The request needs this ticket no more: pins end. Leases of a transfer under way do not. `waited_s`: how long it
    was kept waiting in vain; 0: it never asked, or the engine had it all."""

    ticket: int
    waited_s: float = 0.0


class Reserve(Message, frozen=True):
    """Lease slots to fill these consecutive blocks (the first one's parent is `parent`, empty at the chain's start)."""

    spill: int
    epoch: int
    parent: bytes
    digests: bytes


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

    counts: Annotated[dict[str, int], msgspec.Meta(max_length=MOST_COUNTS)]


class Timings(Message, frozen=True):
    """How long the engine's steps and copies took since the last of these. A step: tokens that it computed for prompts,
    the pairs of them and the tokens before them that attention looked at, seconds. A copy out of the arena: bytes of
    its blocks, seconds."""

    steps: Annotated[list[tuple[int, float, float]], msgspec.Meta(max_length=MOST_TIMINGS)]
    copies: Annotated[list[tuple[int, float]], msgspec.Meta(max_length=MOST_TIMINGS)]


# engine -> well, worker member --------------------------------------------------------------------------------------


class Mapped(Message, frozen=True):
    """The slab is mapped and prefaulted here: its slots may be leased to this session."""

    slab: int


class Unmapped(Message, frozen=True):
    """Nothing of this slab, which was retired, is left here: its pages are free, as far as this worker goes."""

    slab: int


class Filled(Message, frozen=True):
    """This rank's shards: `leases` are written, `dropped` will never be written by this rank, whatever else is said of
    them. Of ranks that hold the same, the first says so."""

    leases: Numbers
    dropped: Numbers


class Recalled(Message, frozen=True):
    """This rank's copies of these transfers have ended, well or badly."""

    transfers: Numbers


# admin --------------------------------------------------------------------------------------------------------------


class Ping(Message, frozen=True):
    number: int


class StatsQuery(Message, frozen=True):
    pass


class NamespacesQuery(Message, frozen=True):
    """Which namespaces hold blocks in host memory? Answered by `Namespaces`."""


class Clear(Message, frozen=True):
    """Drop all blocks of these tiers, or those of the namespace with this 16-byte tag. Answered by `Cleared` when they
    are gone."""

    tiers: list[str]
    namespace: bytes = b""


class DecisionsQuery(Message, frozen=True):
    """What was decided lately, to recall or to recompute? Answered by `Decisions`, the latest `most` first."""

    most: int = 20


class Pause(Message, frozen=True):
    """Nothing of these kinds ("recalls", "spills") begins any more, until they are resumed. Answered by `Paused`."""

    kinds: list[str]
    reason: str = ""


class Resume(Message, frozen=True):
    """The end of a pause. Answered by `Paused`."""

    kinds: list[str]


class PausedQuery(Message, frozen=True):
    """What is paused? Answered by `Paused`."""


class Reload(Message, frozen=True):
    """Read the settings again. Answered by `Reloaded`, or by `Refused` where they cannot be used."""


class Stop(Message, frozen=True):
    """End the well. Answered by `Stopping` before the socket closes."""


# well -> engine -----------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The member belongs to `session`; warnings are for the engine's log. `tiers`: names of the host tier and of those
    below it, the uppermost first; a well of an older version names none."""

    session: int
    protocol: int
    well: str
    host_bytes: int
    warnings: list[str] = []
    tiers: list[str] = []


class Refused(Message, frozen=True):
    """No service for this member; the engine goes on without. The texts are those of a StepwellError."""

    code: str
    what: str
    why: str
    fix: str


class Ready(Message, frozen=True):
    """All members of the session are here; the scheduler may ask."""

    session: int


class Found(Message, frozen=True):
    """Blocks [start, start + len) of a ticket are resident, verified and pinned at `slots` (SLOT_REF bytes).

    With `more` the run may still grow (blocks that are being promoted from a tier or filled by this session, slabs
    being mapped, pins waiting for room); without it the answer is final and `reason` says why the run ends there.
    `sources` has a byte for each block: the place in `Welcome.tiers` of the tier that it was promoted from for this
    ticket, 0 where it was in host memory. `allow_s`: seconds that the next block may take in addition to the usual
    patience, as healthy reads do at the moment; 0 where there is no tier. `limit_s`: seconds that the whole recall is
    worth waiting for; 0: not known.
    """

    ticket: int
    start: int
    slots: bytes
    more: bool
    reason: str = ""
    sources: bytes = b""
    allow_s: float = 0.0
    limit_s: float = 0.0


class GiveWay(Message, frozen=True):
    """Release this ticket unless it was offered to the engine already: because of `reason`; where none is given, an
    earlier request needs room for pins."""

    ticket: int
    reason: str = ""


class Granted(Message, frozen=True):
    """Answer to Reserve: a lease number per digest, 0 where refused; `slots` has one row per lease that is not 0."""

    spill: int
    leases: list[int]
    slots: bytes


class SlabShared(Message, frozen=True):
    """A slab to map (its descriptor comes along): generation words first, slots from `offset` on, `stride` apart."""

    slab: int
    nbytes: int
    offset: int
    stride: int
    slots: int


class SlabRetired(Message, frozen=True):
    """Unmap this slab when the copies in it have ended. Workers that pin say `Unmapped` then."""

    slab: int


class Pong(Message, frozen=True):
    number: int


class Stats(Message, frozen=True):
    """`values` is the flat table that `stepwell stats` prints."""

    values: dict[str, int | float | str]


class NamespaceRow(msgspec.Struct, frozen=True, array_like=True):
    """`tag`: 16 bytes that stand for the namespace. `engines`: labels of live sessions. `quarantined`: nothing of it is
    recalled or spilled."""

    tag: bytes
    tenant: str
    engines: list[str]
    blocks: int
    nbytes: int
    quarantined: bool = False


class Namespaces(Message, frozen=True):
    rows: list[NamespaceRow]


class Cleared(Message, frozen=True):
    """What was dropped, by tier. `partial`: tiers whose storage has failed, or holds a file that may be a segment
    and cannot be read, so that some may come back."""

    blocks: dict[str, int]
    nbytes: dict[str, int]
    partial: list[str] = []


class DecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """One decision: `at_s` after the well's start, on a prompt of `tokens`. `blocks` of its run by tier, `queued` bytes
    that the tiers were asked for before. The first `recall` blocks were wanted, because of `why`. Seconds that were
    expected, None where nothing was known: to recall these blocks (`recall_s`) and to compute the rest (`rest_s`), the
    same for all blocks (`whole_s`, `whole_rest_s`), and to compute everything (`none_s`). `doubt`: share by which they
    may be off; `busy_s`: what the engine computes for others before it comes to this. Then how it went, if it has
    ended: blocks `recalled`, seconds that the request `waited_s` and that reading took (`read_s`), why it `gave_up`,
    and the `regret_s` beside the best that could have been done."""

    number: int
    at_s: float
    tokens: int
    block_tokens: int
    blocks: dict[str, int]
    queued: dict[str, int]
    recall: int
    why: str
    limit_s: float
    doubt: float
    busy_s: float
    recall_s: float | None
    rest_s: float | None
    whole_s: float | None
    whole_rest_s: float | None
    none_s: float | None
    ended: bool = False
    recalled: int = 0
    waited_s: float = 0.0
    read_s: float = 0.0
    gave_up: str = ""
    regret_s: float | None = None


class Decisions(Message, frozen=True):
    rows: list[DecisionRow]


class PauseRow(msgspec.Struct, frozen=True, array_like=True):
    """One kind that is paused: `since`, in seconds since 1970, by user `uid`, for a reason that may be empty."""

    kind: str
    since: float
    uid: int
    reason: str


class Paused(Message, frozen=True):
    """All that is paused now. `kept`: home has it, so that it outlives the well."""

    rows: list[PauseRow]
    kept: bool


class Reloaded(Message, frozen=True):
    """Settings that have changed: `live`, each as (name, value before, value now), from now on; those named in
    `restart` when the well is started again."""

    live: list[tuple[str, str, str]]
    restart: list[str]


class Stopping(Message, frozen=True):
    pass


FromEngine = (
    Hello
    | Ask
    | Recall
    | Release
    | Reserve
    | Abandon
    | Forget
    | Canary
    | Report
    | Timings
    | Mapped
    | Unmapped
    | Filled
    | Recalled
    | Ping
    | StatsQuery
    | NamespacesQuery
    | Clear
    | DecisionsQuery
    | Pause
    | Resume
    | PausedQuery
    | Reload
    | Stop
)
FromWell = (
    Welcome
    | Refused
    | Ready
    | Found
    | GiveWay
    | Granted
    | SlabShared
    | SlabRetired
    | Pong
    | Stats
    | Namespaces
    | Cleared
    | Decisions
    | Paused
    | Reloaded
    | Stopping
)


def overlong(message: FromEngine) -> bool:
    """No engine has so much to say at a time."""
    match message:
        case Filled(leases=leases, dropped=dropped):
            return max(len(leases), len(dropped)) > MOST_LISTED
        case Abandon(leases=numbers) | Recalled(transfers=numbers):
            return len(numbers) > MOST_LISTED
        case Ask(digests=digests) | Forget(digests=digests):
            return len(digests) > 32 * MAX_DIGESTS
        case Report(counts=counts):
            return len(counts) > MOST_COUNTS
        case Timings(steps=steps, copies=copies):
            return max(len(steps), len(copies)) > MOST_TIMINGS
        case _:
            return False


def pieces(message: FromEngine) -> Iterator[FromEngine]:
    """The message, or several that say the same, each of a list that is short."""
    match message:
        case Filled(leases=leases, dropped=dropped) if len(leases) + len(dropped) > PIECE:
            yield from (Filled([], some) for some in _cut(dropped))  # first: what is dropped is not written
            yield from (Filled(some, []) for some in _cut(leases))
        case Abandon(leases=leases) if len(leases) > PIECE:
            yield from map(Abandon, _cut(leases))
        case Recalled(transfers=transfers) if len(transfers) > PIECE:
            yield from map(Recalled, _cut(transfers))
        case _:
            yield message


def _cut(numbers: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(numbers), PIECE):
        yield numbers[at : at + PIECE]
