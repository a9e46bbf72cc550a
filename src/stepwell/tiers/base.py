"""`Tier`: one level below the arena, as the hierarchy sees it.

A tier keeps frames: opaque sealed bytes under a key. It knows neither tokens nor tenants, decides nothing about what is
worth keeping, and answers with values that say why. `stepwell.testing.tier_kit` holds the contract as tests.

Calls may block on I/O and are made on an executor's threads, several at a time; a tier locks what it must. Buffers
belong to the caller, who keeps them alive and untouched until the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

FrameKey = NewType("FrameKey", bytes)
"""What a frame is filed under: block id and shard, 1 to 64 bytes. Means nothing to a tier."""

MAX_KEY = 64


class MissReason(Enum):
    """Why a frame is not to be had from a tier. The values are metric labels."""

    ABSENT = "absent"  # not here: never was, was dropped or was evicted
    DAMAGED = "damaged"  # was here, but fewer or other bytes came back than were written
    FAILED = "failed"  # the device or network said no; the frame may still be there


class RefusedReason(Enum):
    """Why a tier did not take a frame. The values are metric labels."""

    FULL = "full"  # no room now, and nothing can be evicted for it
    TOO_LARGE = "too_large"  # would never fit
    FAILED = "failed"  # the device or network said no


@dataclass(frozen=True, slots=True)
class Hit:
    """The frame is here and has `nbytes` bytes; after a read, they lie at the start of the buffer."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The frame is not to be had; what the buffer holds means nothing."""

    reason: MissReason


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now; nothing was done. Trying again before `retry_after` seconds have passed is of no use."""

    retry_after: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The frame can be read from now on, as it is and until it is dropped or evicted. Nothing is said about a crash."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The frame was not taken; an older frame under its key may be gone."""

    reason: RefusedReason


Lookup = Hit | Miss | Busy
Read = Hit | Miss | Busy
Write = Stored | Busy | Refused


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of frames. used <= limit at all times; limit is 0 for a tier that keeps nothing."""

    used: int
    limit: int


def examine(keys: Sequence[FrameKey], *, closed: bool) -> None:
    """Raises ValueError where the contract says so: what every implementation checks first."""
    if closed:
        raise ValueError("the tier is closed")
    if not all(0 < len(key) <= MAX_KEY for key in keys):
        raise ValueError(f"a frame key has 1 to {MAX_KEY} bytes")


class Tier(Protocol):
    """All methods may be called from several threads at once, and all but `close` raise ValueError on a closed tier or
    an impossible key. Trouble with device or network is an answer, never an exception."""

    @property
    def name(self) -> str:
        """Short and stable, for metrics and messages."""

    def lookup(self, keys: Sequence[FrameKey]) -> list[Lookup]:
        """One answer per key, in order. A hit is a promise to look, not to find: a read may still miss.

        May block, but not on a whole frame's bytes.
        """

    def read(self, key: FrameKey, into: memoryview) -> Read:
        """Copies the frame to the start of `into`. May block.

        `into` is writable, contiguous bytes; if the frame does not fit the answer is Miss(DAMAGED), since the caller
        knows how long its frames are. Only a Hit says anything about the content of `into`; the caller still verifies
        the seal, for a tier may be given wrong bytes without noticing.
        """

    def write(self, key: FrameKey, frame: memoryview) -> Write:
        """Takes a copy of the frame, replacing one of the same key. May block, but not until there is room: a tier that
        cannot keep up answers Busy. Readers see the old frame, the new one or none, never a mixture."""

    def drop(self, keys: Sequence[FrameKey]) -> None:
        """Forgets these frames, those that are not here included: lookups and reads that begin later miss. Their bytes
        may lie on the device for longer; making them unreadable is a matter of keys. May block."""

    def capacity(self) -> Capacity:
        """Does not block."""

    def recover(self) -> Iterator[FrameKey]:
        """The keys of frames that an earlier life of this tier left and that can be read now, each once, in slices that
        the caller may interleave with other calls. Call once, before the first write. May block at each step; what
        cannot be understood is skipped, not deleted."""

    def close(self) -> None:
        """Frees what the process holds for the tier; idempotent. No other call may be running, unless it is stuck: it
        is not waited for."""
