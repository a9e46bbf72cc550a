"""What commands and operators say to a well, and its answers."""

from __future__ import annotations

import msgspec

from stepwell.block.tier import Figures
from stepwell.protocol.base import Message
from stepwell.protocol.hello import CacheGroup


class Ping(Message, frozen=True):
    number: int


class StatsQuery(Message, frozen=True):
    """Answered by `Stats`; without `by_tier`, as older commands ask, in one flat table."""

    by_tier: bool = False


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


class Pong(Message, frozen=True):
    number: int


class Stats(Message, frozen=True):
    """The parts of a `WellStats`, or all its figures in `values`."""

    values: Figures
    tiers: dict[str, Figures] = {}


class NamespaceRow(msgspec.Struct, frozen=True, array_like=True):
    """`tag`: 16 bytes that stand for the namespace. `engines`: labels of live sessions. `quarantined`: nothing of it is
    recalled or spilled. `nearest`: tag of the tenant's namespace that this one with live engines differs least from, if
    that holds more blocks. `differs`: what differs, each as name, value here and value there. `groups`: of the model
    of its live engines, as they have said; a block has `shards` of what these say."""

    tag: bytes
    tenant: str
    engines: list[str]
    blocks: int
    nbytes: int
    quarantined: bool = False
    nearest: bytes = b""
    differs: list[tuple[str, str, str]] = []
    groups: list[CacheGroup] = []
    shards: int = 1


class Namespaces(Message, frozen=True):
    rows: list[NamespaceRow]


class Cleared(Message, frozen=True):
    """What was dropped, by tier. `partial`: tiers whose storage has failed, or holds blocks of a later release or a
    file that may be a segment and cannot be read, so that some may come back."""

    blocks: dict[str, int]
    nbytes: dict[str, int]
    partial: list[str] = []


class PlaceRow(msgspec.Struct, frozen=True, array_like=True):
    """The prefix reaches over `blocks`, of which the last `places` were looked at and `tried` of them asked for.
    `missing`: cache groups, each with the number of places at which something of it was not there."""

    blocks: int
    places: int
    tried: int
    missing: list[tuple[str, int]]


class DecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """One decision: `at_s` after the well's start, on a prompt of `tokens`. `blocks` of its run by tier, `queued` bytes
    that the tiers were asked for before. The first `recall` blocks were wanted, because of `why`. Seconds that were
    expected, None where nothing was known: to recall these blocks (`recall_s`) and to compute the rest (`rest_s`), the
    same for all blocks (`whole_s`, `whole_rest_s`), and to compute everything (`none_s`). `doubt`: share by which they
    may be off; `busy_s`: what the engine computes for others before it comes to this. Then how it went, if it has
    ended: blocks `recalled`, seconds that the request `waited_s` and that reading took (`read_s`), why it `gave_up`,
    and the `regret_s` beside the best that could have been done. `prefix`: of a window or a state, the decision on the
    prefix of the same request, 0 where it is not known; None: it is about a prefix. `no_place`: why the request does
    not go on where its prefix ends, where that is so."""

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
    prefix: int | None = None
    no_place: PlaceRow | None = None


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
