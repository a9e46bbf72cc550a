"""What a scheduler has asked of the well and what is known of the answers: prefixes to recall, blocks to find, slots to
fill."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell.protocol.messages import NoPlace

FOR_ROOM = ("pins", "no_room")
IN_LINE = ("staging", *FOR_ROOM)
"""Reasons to wait that other requests have a part in: they are served by turns."""

MAX_ASKS = 4096
"""Questions of one session that wait for an answer, and requests that hold one. The well ends a session of which more
requests do."""

SlotRefs = npt.NDArray[np.void]
"""SLOT_REF rows of shape (blocks, shards)."""


@dataclass(slots=True, eq=False)
class PrefixQuestion:
    """One request's question and what is known of the answer so far. Written by the link's thread under the client's
    lock; numbers only grow, so the scheduler may read without it."""

    ticket: int
    session: int
    news: float  # when one of its blocks was found, or the line moved for it
    blocks: int = 0  # leading run that is resident and pinned
    known: int = 0  # leading run that may be recalled as a stream, as the well last said
    ends: str = ""  # why that is not more; "" while it is not known how much it is
    lies: list[tuple[int, int]] = field(default_factory=list)  # where that lay: see `Found.lies`
    refs: list[SlotRefs] = field(default_factory=list)
    sources: bytearray = field(default_factory=bytearray)  # of each block: see `Found.sources`
    answered: bool = False
    final: bool = False
    reason: str = ""  # why it waits, as the well last said, or why its run has ended
    offered: bool = False
    unwanted: bool = False  # released as soon as the answer is final
    first_poll: float = 0.0
    sharing: int = 0  # the most others that were in line with it at a time, as far as is known
    lined_up: bool = False  # it has waited for a reason of IN_LINE
    turn: float = 0.0  # when one in line last had all that it asked for
    settled: float = 0.0  # when waiting ended
    limit_s: float = 0.0  # what the well says that its recall is worth waiting for
    allow_s: float = 0.0  # and what it allows in addition for the next block, which comes from a tier
    no_place: NoPlace | None = None  # why its request does not go on where this prefix ends

    @property
    def in_line(self) -> bool:
        """It waits in the line, as far as is known: one that was polled and has no answer yet may well."""
        waits = self.lined_up or (self.first_poll > 0 and not self.answered)
        return waits and not (self.final or self.settled)

    @property
    def waited_s(self) -> float:
        """How long the request was kept waiting; 0: it was not, or its wait has not ended."""
        return max(1e-6, self.settled - self.first_poll) if self.settled and self.first_poll else 0.0

    def needless(self) -> None:
        """The engine had all of it itself: it was not waited for."""
        self.first_poll = 0.0

    @property
    def turn_s(self) -> float:
        """How much of that was since another one had all that it asked for."""
        return min(self.waited_s, max(0.0, self.settled - self.turn))


@dataclass(slots=True, eq=False)
class BlocksQuestion:
    """Which of so many blocks are there. `here`: None until it is answered, then a byte for each, 1 or 0 (`Seen`)."""

    ticket: int
    blocks: int
    here: bytes | None = None


@dataclass(slots=True, eq=False)
class Spill:
    """Blocks that are to be filled: `leases` (0 = refused), `refs` (a row per lease) and `reason` (why the last ones
    were refused, "" if all that were are there) once `granted`."""

    number: int
    session: int
    blocks: int
    granted: bool = False
    cancelled: bool = False
    leases: list[int] = field(default_factory=list)
    refs: SlotRefs | None = None
    reason: str = ""

    def cut(self) -> int:
        """Takes the blocks behind the last lease out of it, all of which were refused; how many are left."""
        self.blocks = max((at for at, lease in enumerate(self.leases, 1) if lease), default=0)
        del self.leases[self.blocks :]
        return self.blocks
