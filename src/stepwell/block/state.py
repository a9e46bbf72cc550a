"""Residency of a block in one tier: its states, and the only transitions between them.

Every change of state in the project goes through `after`. The table is replayed by the model tests.
"""

from __future__ import annotations

from enum import Enum


class BlockState(Enum):
    ABSENT = "absent"
    FILLING = "filling"  # its session is writing it; it cannot be read
    RESIDENT = "resident"  # complete, readable
    DRAINING = "draining"  # unreachable; its bytes are still held by a copy under way


class Event(Enum):
    FILL = "fill"
    LAND = "land"  # every rank has written its shard
    FAIL = "fail"  # a rank dropped it, or its session ended
    DRAIN = "drain"  # dropped while a copy still reads it
    GONE = "gone"  # dropped, and no copy holds it


LEGAL: dict[tuple[BlockState, Event], BlockState] = {
    (BlockState.ABSENT, Event.FILL): BlockState.FILLING,
    (BlockState.FILLING, Event.LAND): BlockState.RESIDENT,
    (BlockState.FILLING, Event.FAIL): BlockState.ABSENT,
    (BlockState.RESIDENT, Event.DRAIN): BlockState.DRAINING,
    (BlockState.RESIDENT, Event.GONE): BlockState.ABSENT,
    (BlockState.DRAINING, Event.GONE): BlockState.ABSENT,
}


class IllegalChange(RuntimeError):
    """A bug in stepwell: this event cannot happen in this state."""


def after(state: BlockState, event: Event) -> BlockState:
    """The state that follows. Raises IllegalChange where the table has no such row."""
    try:
        return LEGAL[state, event]
    except KeyError:
        raise IllegalChange(f"{event.value} while {state.value}") from None
