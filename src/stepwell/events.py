"""Events of a hierarchy, as values for sinks that count, log or test them.

A sink is called on the hierarchy's thread, once for each event, after it has happened. It must not block, raise or
call back. Nothing in an event tells tokens, prompts or tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """All members of an engine are here. `label` is the model's name, made fit for a log."""

    session: int
    label: str
    ranks: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """`quarantined`: slots that its processes may still be writing."""

    session: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """A message that no engine of ours sends: its session ends. `what` and `code` are those of the error."""

    session: int
    code: str
    what: str


@dataclass(frozen=True, slots=True)
class SlabServing:
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlabRemoved:
    nbytes: int


@dataclass(frozen=True, slots=True)
class RunAnswered:
    """A request has its final answer: blocks of its leading run, how many of them were promoted from a tier for it,
    blocks beyond it, and why it ended there. `tail`: they are of its window or state, not of its prefix."""

    hits: int
    staged: int
    missed: int
    reason: str
    tail: bool = False


@dataclass(frozen=True, slots=True)
class BlocksRecalled:
    """Blocks were leased for copying into an engine."""

    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlocksSpilled:
    """Blocks were published: every rank has written its shards."""

    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SpillRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class BlockDropped:
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksStaged:
    """A tier has answered a read of several blocks: those that came, their bytes, and the seconds that it took."""

    tier: str
    blocks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockNotRead:
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """A tier has answered a write of several blocks: those that it took, their bytes, and the seconds that it took."""

    tier: str
    blocks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockNotWritten:
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksPrefetched:
    """A tier was asked for blocks that no request has asked for yet."""

    tier: str
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefetchEnded:
    """A guess is over: of the blocks that were promoted for it, those that were asked for in its time, and not."""

    used: int
    unused: int


@dataclass(frozen=True, slots=True)
class TierBreakerMoved:
    """A tier is asked for no more reads or writes ("open"), for one at a time ("half_open") or as usual ("closed")."""

    tier: str
    operation: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class TierRecovered:
    """Blocks that an earlier life of the tier left, the seconds that finding them took, and segments with blocks whose
    keys are not in the keyring."""

    tier: str
    blocks: int
    seconds: float
    kept: int = 0


@dataclass(frozen=True, slots=True)
class CanaryHeard:
    """An engine has computed stored blocks once more. `excess`: the largest error of a layer over its bound; above 1 it
    is a mismatch."""

    excess: float


@dataclass(frozen=True, slots=True)
class NamespaceQuarantined:
    """Its blocks were made by other weights than its engines have, or its engines do not compute what they did. `tag`
    stands for it; `excess` as in the last canary."""

    tag: bytes
    excess: float


@dataclass(frozen=True, slots=True)
class QuarantineLifted:
    tag: bytes


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """User `uid` has paused or resumed all that is of this kind: "recalls" or "spills"."""

    kind: str
    paused: bool
    uid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds that were expected of one choice: to recall `blocks`, and to compute the rest of the prompt."""

    blocks: int
    recall_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class RecallDecided:
    """How much of a request's run is worth recalling. `blocks` of the run and `queued` bytes by tier; `doubt`: share by
    which the expectations may be off; `busy_s`: what the engine computes for others first. Expected of what was
    `chosen`, of the `whole` run and of none of it (`none_s`): None where nothing was known. `prefix`: the run is of a
    window or a state, and this is the decision on the prefix that it goes with, 0 where that is not known."""

    number: int
    at_s: float
    tokens: int
    block_tokens: int
    blocks: Mapping[str, int]
    queued: Mapping[str, int]
    recall: int
    why: str
    limit_s: float
    doubt: float = 1.0
    busy_s: float = 0.0
    chosen: Expected | None = None
    whole: Expected | None = None
    none_s: float | None = None
    prefix: int | None = None


@dataclass(frozen=True, slots=True)
class PlaceMissed:
    """A request did not go on where its prefix ends, since a window or a state is not there: blocks of the prefix, the
    last places of it that were looked at, and how many of these were asked for. `missing`: cache groups, each with the
    number of places at which something of it was not there."""

    blocks: int
    places: int
    tried: int
    missing: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class RecallEnded:
    """How a decision went: blocks that the engine took, seconds that its request waited and that reading took, and why
    it was given up, if it was. `regret_s`: how much longer the request took than with the best choice, `best_s`, of who
    had known what is known now; None where that cannot be said. `no_place`: why it did not take more."""

    number: int
    recalled: int
    waited_s: float
    read_s: float
    gave_up: str
    regret_s: float | None = None
    best_s: float | None = None
    no_place: PlaceMissed | None = None


@dataclass(frozen=True, slots=True)
class GivenUpTooSoon:
    """A block came that a request had given up, which took so much longer by computing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class EngineReported:
    """Counts of what only the engine side sees."""

    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class ArenaTroubled:
    """Memory for a slab was refused; `error` is the whole line for a person."""

    error: str


Event = (
    SessionOpened
    | SessionEnded
    | MessageRefused
    | SlabServing
    | SlabRemoved
    | RunAnswered
    | BlocksRecalled
    | BlocksSpilled
    | SpillRefused
    | BlockDropped
    | BlocksStaged
    | BlockNotRead
    | BlocksWritten
    | BlockNotWritten
    | BlocksPrefetched
    | PrefetchEnded
    | TierBreakerMoved
    | TierRecovered
    | CanaryHeard
    | NamespaceQuarantined
    | QuarantineLifted
    | PauseChanged
    | RecallDecided
    | RecallEnded
    | GivenUpTooSoon
    | EngineReported
    | ArenaTroubled
)
Sink = Callable[[Event], None]
