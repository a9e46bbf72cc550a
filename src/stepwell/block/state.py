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

    __hash__ = object.__hash__  # an Enum's own is Python, and asked for with every change


class StateEvent(Enum):
    FILL = "fill"
    LAND = "land"  # every rank has written its shard
    FAIL = "fail"  # a rank dropped it, or its session ended
    DRAIN = "drain"  # dropped while a copy still reads it
    GONE = "gone"  # dropped, and no copy holds it

    __hash__ = object.__hash__


LEGAL: dict[tuple[BlockState, StateEvent], BlockState] = {
    (BlockState.ABSENT, StateEvent.FILL): BlockState.FILLING,
    (BlockState.FILLING, StateEvent.LAND): BlockState.RESIDENT,
    (BlockState.FILLING, StateEvent.FAIL): BlockState.ABSENT,
    (BlockState.RESIDENT, StateEvent.DRAIN): BlockState.DRAINING,
    (BlockState.RESIDENT, StateEvent.GONE): BlockState.ABSENT,
    (BlockState.DRAINING, StateEvent.GONE): BlockState.ABSENT,
}


class IllegalChange(RuntimeError):
    """A bug in stepwell: this event cannot happen in this state."""


def after(state: BlockState, event: StateEvent) -> BlockState:
    """The state that follows. Raises IllegalChange where the table has no such row."""
    try:
        return LEGAL[state, event]
    except KeyError:
        raise IllegalChange(f"{event.value} while {state.value}") from None
