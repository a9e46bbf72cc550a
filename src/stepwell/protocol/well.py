"""What a well says to an engine's members."""

from __future__ import annotations

from stepwell.protocol.base import Message


class Welcome(Message, frozen=True):
    """The member belongs to `session`; warnings are for the engine's log. `tiers`: names of the host tier and of those
    below it, the uppermost first. `flags`: optional abilities by name; an engine ignores those that it does not
    know."""

    session: int
    protocol: int
    well: str
    host_bytes: int
    warnings: list[str] = []
    tiers: list[str] = []
    flags: list[str] = []


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
    patience, as healthy reads do at the moment or as it is worth by what giving up costs; 0 where there is no tier.
    `limit_s`: seconds that the whole recall is worth waiting for; 0: not known. `known`: leading blocks of the run that
    are in host memory or in a tier and worth having, which may be recalled as a stream, once all of it was looked up;
    `ends` says why these are not more, and is "" before that. `lies`: then, of each stretch of the run, where it lay
    (as in `sources`) and how many blocks it has.
    """

    ticket: int
    start: int
    slots: bytes
    more: bool
    reason: str = ""
    sources: bytes = b""
    allow_s: float = 0.0
    limit_s: float = 0.0
    known: int = 0
    ends: str = ""
    lies: list[tuple[int, int]] = []


class Seen(Message, frozen=True):
    """Answer to Look: `here` has a byte for each digest. 1: the block is in host memory or being promoted to it, or a
    tier that is not down has it. 0: it is not, it is still being filled, or nothing may be recalled at the moment."""

    ticket: int
    here: bytes


class Landed(Message, frozen=True):
    """The next blocks of a streamed transfer are resident, verified and leased at `slots` (SLOT_REF bytes of all
    shards).

    Without `more` none follow, and `reason` says why. `allow_s`: see `Found`.
    """

    transfer: int
    slots: bytes
    more: bool
    reason: str = ""
    allow_s: float = 0.0


class LineMoved(Message, frozen=True):
    """The line moves: requests have got blocks from a tier, or room. Whoever waits is not stalled, but for those in
    `apart`, by ticket or as a stream by transfer: their next blocks are being read, or are to come from a tier that has
    given nothing. `sharing`: how many requests are in line. `whole`: one of them has had all that it asked for since
    the last time."""

    apart: list[int]
    sharing: int
    whole: bool = False


class GiveWay(Message, frozen=True):
    """Release this ticket unless it was offered to the engine already: because of `reason`; where none is given, an
    earlier request needs room for pins, and this one waits again. Until it is released nothing more is told of it."""

    ticket: int
    reason: str = ""


class Granted(Message, frozen=True):
    """Answer to Reserve: a lease number per digest, 0 where refused; `slots` has one row per lease that is not 0.
    `reason`: why the last ones were refused; "" if all that were not leased are there or being filled."""

    spill: int
    leases: list[int]
    slots: bytes
    reason: str = ""


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
