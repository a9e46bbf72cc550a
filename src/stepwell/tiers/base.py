"""`Tier`: one level below the arena, as the hierarchy sees it.

A tier keeps blocks as frames: opaque bytes that callbacks make and open. It knows neither tokens nor tenants nor keys,
decides nothing about what is worth keeping, and answers with values that say why. `stepwell.testing.tier_kit` holds
the contract as tests.

A tier is a state machine on its owner's thread, like the hierarchy itself: no call blocks, what does is a job of the
executor that the tier was given, and completions come on the owner's thread. Frames are made in the tier's own buffers
and opened from them on the job's thread: sealing is the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from stepwell.block.namespace import BlockId
from stepwell.io.memory import Bytes


class Reading(Enum):
    """What came of reading a block. The values are metric labels."""

    GOOD = "good"
    ABSENT = "absent"  # not here (any more)
    DAMAGED = "damaged"  # was here, but other bytes came back than were written
    UNKNOWN = "unknown"  # is here, written by a later release: it cannot be used, and stays as it is
    FAILED = "failed"  # the device or network said no; the block may still be there


class Writing(Enum):
    """What came of writing a block. The values are metric labels."""

    STORED = "stored"  # can be read from now on, until it is dropped or evicted; nothing is said about a power cut
    FULL = "no_space"  # no room now
    TOO_LARGE = "too_large"  # would never fit
    FAILED = "failed"  # the device or network said no


@dataclass(frozen=True, slots=True)
class Place:
    """What the frames of one block are sealed for: a segment's id, 16 bytes, and the number of the block's first part
    in it. Both together never come twice."""

    segment: bytes
    ordinal: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to be written. Its frames are made in parts, in order, on a thread of the executor: `make` fills part n,
    of `parts[n]` bytes (whole pages), for the block's place.

    `namespace` (16 bytes) and `commit` (a function of the segment's id: the commitment to the key, 32 bytes) go into
    the tier's own index, so that a later life can tell whose a block is without reading it. `codec`: number of the
    codec of its frames. `position`: blocks before it in its prefix, -1 where that is not known; `parent`: the block
    before it, where that is known. Tiers that lay out or name blocks by runs go by them."""

    id: BlockId
    namespace: bytes
    parts: tuple[int, ...]
    commit: Callable[[bytes], bytes]
    make: Callable[[int, Bytes, Place], None]
    expires: int = 0
    codec: int = 0
    position: int = -1
    parent: BlockId | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A block to be read. `open` is given part n, of `parts[n]` bytes (whole pages), and the segment's id, in order, on
    a thread of the executor, until it answers otherwise than GOOD; the bytes are the tier's and mean nothing after it
    has returned. `fail` is called on that thread if the block's answer is another than GOOD and it was begun; after it
    the block may be begun again."""

    id: BlockId
    parts: tuple[int, ...]
    open: Callable[[int, Bytes, bytes], Reading]
    fail: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes. used <= limit at all times; limit is 0 for a tier that keeps nothing."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a clear has forgotten: blocks that could be found, and bytes that were deleted. `whole`: that is all that
    there was; else storage has failed, and some of it may be found again."""

    blocks: int = 0
    nbytes: int = 0
    whole: bool = True

    def __add__(self, other: Forgotten) -> Forgotten:
        return Forgotten(self.blocks + other.blocks, self.nbytes + other.nbytes, self.whole and other.whole)


@dataclass(slots=True)
class TierCounts:
    """What a tier has done since it was opened. `device_bytes` were written to the device, padding, footers and what
    was written again included; `errors` by kind."""

    device_bytes: int = 0
    evicted_blocks: int = 0
    reinserted_blocks: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def error(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1


class KeyResolver(Protocol):
    """What a tier may ask about keys without knowing any. Any thread."""

    def knows(self, commitment: bytes, segment: bytes) -> bool:
        """The key that this commitment was made with, for the segment with this id, is there (or none is needed)."""

    def again(self, commitment: bytes, segment: bytes, other: bytes) -> bytes | None:
        """The commitment to the same tenant's key for another segment; None: it is not known."""

    def remake(self, frames: Bytes, segment: bytes, into: Bytes, place: Place) -> Reading:
        """Opens a block's frames of the segment and makes them anew for `place`, if they are GOOD."""


ReadDone = Callable[[list[Reading]], None]
WriteDone = Callable[[list[Writing]], None]
ProbeDone = Callable[[Reading], None]


class Tier(Protocol):
    """Answers come in the order of the blocks, never inside the call that asked."""

    @property
    def counts(self) -> TierCounts:
        """What it has done since it was opened."""

    @property
    def name(self) -> str:
        """Short and stable, for metrics and messages."""

    def lookup(self, id: BlockId) -> bool:
        """A hint, free of I/O: True is a promise to look, not to find."""

    def touch(self, id: BlockId) -> None:
        """The block was used, though not read from here: where it lies it is as if it had been. Free of I/O."""

    def read(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        """Reads blocks that are needed in this order; those that lie side by side come in one I/O. A block that turned
        out absent or damaged is looked up no more. What is UNKNOWN is kept, and counts against the capacity, until all
        blocks are cleared."""

    def write(self, blocks: Sequence[Outgoing], done: WriteDone) -> None:
        """Writes blocks side by side, in this order. Readers see a block as it was written, or not at all."""

    def drop(self, id: BlockId) -> None:
        """Forgets a block: lookups that come later miss. Its bytes may lie there for longer."""

    def clear(self, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        """Forgets all blocks at once, or, by and by, those of one namespace (its tag), and deletes their bytes. `done`
        is called when they are gone: no lookup, no read and no later life finds a block that was stored before this
        call, and no read of one is under way. Writes that were asked for before may come to nothing. What is written
        after this call stays, and so does what belongs to other namespaces."""

    def capacity(self) -> Capacity: ...

    def figures(self) -> dict[str, int]:
        """Further numbers for people, by short names."""

    def recover(self, done: Callable[[int], None]) -> None:
        """Finds what an earlier life left, in the background; `done` is told how many blocks. Call once, at first; all
        other calls are allowed meanwhile."""

    def settle(self, done: Callable[[], None]) -> None:
        """Brings what is kept into the form that a next life finds fastest. No write may follow."""

    def close(self) -> None:
        """Frees what the process holds for the tier; idempotent. No job may be running, unless it is stuck."""


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier that others write to as well, and may be far away: its blocks appear and vanish by themselves, so that
    `lookup` knows only of some."""

    def probe(self, ids: Sequence[BlockId], done: ProbeDone) -> None:
        """Finds out which of these consecutive blocks of one prefix are here: `lookup` knows it from then on. `done` is
        told GOOD if any is, ABSENT if none is, FAILED if the tier could not be asked. Bounded in time by the tier."""
