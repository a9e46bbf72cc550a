"""Sessions: one engine, its members, and what they hold.

A session lives while all its members do. When one is lost it ends as a whole: what it was filling is quarantined and
what it was copying stays leased until every process that might still be copying has exited or has acknowledged. Time
alone never frees a slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from stepwell.block.namespace import LOADED_FROM_FILES, BlockId
from stepwell.events import PlaceMissed
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.sessions.decision import EngineLoad, OpenDecision
from stepwell.hierarchy.sessions.keyed import KeyedNamespace
from stepwell.policies.turns import RequestTurn
from stepwell.protocol.messages import MAX_DIGESTS, Hello, Message, NoPlace

NAMED = 32
"""Blocks that are named together: what is done to them is a slice of work."""

Engine = tuple[int, str, str]
"""The user it runs as, its tenant, and its own name for itself: no process speaks for an engine of another user or
tenant, and no session has members of two."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, by the operating system. `watched`: its exit will be reported by a pidfd.
    `tenant`: whose it is, by its user or the socket that it came in by."""

    uid: int
    pid: int
    watched: bool
    tenant: str


class Channel(Protocol):
    """The well's end of a member's connection. Neither call blocks, nor calls back into the hierarchy."""

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Sends the message with these descriptors, which stay the caller's."""

    def sever(self) -> None:
        """Ends the connection, after what was sent."""


@dataclass(slots=True, eq=False)
class Member:
    """One connection of a session."""

    number: int
    peer: Peer
    hello: Hello
    channel: Channel
    session: Session
    exited: bool = False

    @property
    def engine(self) -> Engine:
        return self.peer.uid, self.peer.tenant, self.hello.engine

    @property
    def is_scheduler(self) -> bool:
        return self.hello.role == "scheduler"

    @property
    def label(self) -> str:
        """The model's name for people, of at most 64 printable characters: of a path the last part, which tells nothing
        of whose folder it is, and in a log it is no line of its own."""
        name = self.hello.label.rstrip("/").rpartition("/")[2]
        return "".join(c if c.isprintable() else "?" for c in name[:64])


class SessionPhase(Enum):
    ASSEMBLING = "assembling"
    LIVE = "live"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a session is filling: complete when no rank that writes is missing."""

    entry: Entry
    missing: set[int]
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    """A recall under way: `entries` are leased until no rank is missing."""

    entries: deque[Entry]
    missing: set[int]
    stream: RecallStream | None = None


@dataclass(slots=True, eq=False)
class RecallStream:
    """A transfer whose blocks are leased as they land, and no longer than it takes all ranks to copy them. `request` is
    the one that they are for, which has asked for blocks from `first` on. `copied` says how many each rank has, and
    `copied_bytes` what those are that all of them have. `told_all`: the workers know of all that come."""

    request: RecallRequest
    first: int
    copied: dict[int, int]
    began: float
    copied_bytes: int = 0
    told_all: bool = False

    @property
    def done(self) -> int:
        """How many of its blocks all ranks have copied."""
        return min(self.copied.values())


@dataclass(slots=True, eq=False)
class RecallRequest:
    """A request that asked. `pinned` is its run so far; the first `landed` blocks of it are RESIDENT, those behind them
    are being promoted. `promoted` says of each whether it came from a level below, for this request. The pins of the
    first `freed` have ended: a stream has copied them, or does not need them."""

    number: int
    order: int
    turn: RequestTurn
    epoch: int
    digests: bytes
    pinned: list[Entry] = field(default_factory=list)
    promoted: bytearray = field(default_factory=bytearray)
    landed: int = 0
    told: int = 0  # blocks of the run that the client, or a stream, knows of; at most those that have landed
    used: int = 0  # blocks whose use was noted when the client, or a stream, was told of them
    freed: int = 0  # at most those that are told
    known: int = 0  # leading blocks that were found somewhere when the run was weighed, and are worth having
    ends_known: str = ""  # why these are not more
    lies: list[tuple[int, int]] = field(default_factory=list)  # where these lay: see `Found.lies`
    transfer: int = 0  # the stream that it has become; 0: none
    waited_s: float = 0.0  # before it became that
    answered: bool = False  # it has had a final answer
    ends: str = ""  # why the run cannot grow beyond what is pinned: a block below turned out not to be there
    queued: bool = True  # a slice of work for it is in the queue
    waiting: str = ""  # why the run does not grow at the moment; "" while it does or when it is final
    asked_way: bool = False
    gave_way: bool = False
    counted: int = 0  # blocks of its run whose use is counted, as far as they were not here
    tokens: int = 0  # of the whole prompt, as far as its engine has said
    recall: str = ""  # a wish of its own
    prefix: int = 0  # of a tail: the number of the request for its prefix
    weighed: OpenDecision | None = None  # what was decided, once it is known where its run lies
    most: int = MAX_DIGESTS  # blocks that are worth having
    short: str = ""  # why it is not to have more
    allow_s: float = 0.0  # what its client was last told that the next block may take
    probed: bool = False  # tiers that others write to were asked for its run, if they could be
    extended: bool = False  # they had more of it than was weighed

    named: tuple[int, list[list[BlockId]]] = (0, [])  # a few of its blocks from one on, under each key

    @property
    def blocks(self) -> int:
        return len(self.digests) // 32

    @property
    def awaited(self) -> Entry | None:
        """The first block of its run that has not landed; None: all have that are pinned."""
        return self.pinned[self.landed] if self.landed < len(self.pinned) else None

    def names(self, at: int, origins: tuple[Origin, ...]) -> list[list[BlockId]]:
        """The ids under each key of the blocks from this one on, NAMED at most."""
        self.ids(at, origins)
        first, names = self.named
        return [ids[at - first :] for ids in names]

    def ids(self, at: int, origins: tuple[Origin, ...]) -> list[BlockId]:
        """The block's id under each key, the tenant's newest first."""
        first, names = self.named
        if not (names and first <= at < first + len(names[0])):
            first, names = at, [origin.names(self.digests[32 * at : 32 * (at + NAMED)]) for origin in origins]
            self.named = first, names
        return [ids[at - first] for ids in names]


@dataclass(slots=True, eq=False)
class Session:
    number: int
    engine: Engine
    tenant: str
    phase: SessionPhase = SessionPhase.ASSEMBLING
    scheduler: Member | None = None
    workers: dict[int, Member] = field(default_factory=dict)
    keyed: KeyedNamespace | None = None  # once live
    owner: Owner | None = None
    copiers: frozenset[int] = frozenset()  # members that copy, once live: a slab is usable when all have mapped it
    shards: int = 0  # of a block, once live
    writers: frozenset[int] = frozenset()  # ranks that fill them, one each
    load: EngineLoad | None = None  # once something was weighed for it
    requests: dict[int, RecallRequest] = field(default_factory=dict)
    fills: dict[int, Fill] = field(default_factory=dict)
    filling: dict[BlockId, int] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    early: dict[int, set[int]] = field(default_factory=dict)  # ranks that have copied what is not known as a transfer
    held_bytes: int = 0  # of what it has said and what waits to be done
    forgetting: int = 0  # of those, digests of blocks that are to be forgotten

    def origins(self, epoch: int) -> tuple[Origin, ...]:
        """A live session's namespace at this weights epoch, under each key of its tenant, the newest first."""
        assert self.keyed is not None
        return self.keyed.at(epoch)

    @property
    def tag(self) -> bytes:
        """The tag of a live session's namespace with its weights as loaded: what its costs are kept by."""
        return self.origins(LOADED_FROM_FILES)[0].tag

    def named(self, no_place: NoPlace | None) -> PlaceMissed | None:
        """What the scheduler says of its groups, with their names."""
        if no_place is None or self.scheduler is None:
            return None
        groups, n = self.scheduler.hello.groups, no_place
        missing = tuple((groups[group].name, places) for group, places in n.missing if 0 <= group < len(groups))
        return PlaceMissed(n.blocks, n.places, n.tried, missing)

    @property
    def members(self) -> list[Member]:
        return [m for m in (self.scheduler, *self.workers.values()) if m is not None]

    @property
    def complete(self) -> bool:
        """All that the scheduler announced are here (or more: `open` refuses those)."""
        return self.scheduler is not None and len(self.workers) >= self.scheduler.hello.world


@dataclass(slots=True, eq=False)
class Quarantine:
    """Holds that an ended session left: `slots` that were being written and `entries` that were being read. Freed when
    `alive` (member number by rank, of the processes that may still copy) is empty."""

    session: int
    engine: Engine
    alive: dict[int, int]
    slots: list[tuple[Slab, int]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
