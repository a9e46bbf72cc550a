"""Turns of the queue of work: how much is done in one, and what comes first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepwell.hierarchy.work import (
    MAX_TURN_S,
    ROOM_WAIT_S,
    TURN_BLOCKS,
    TURN_S,
    WALK_BLOCKS,
    Work,
    WorkQueue,
    WorkStep,
)
from stepwell.testing.clock import SetClock


class Watched:
    """A queue, and whose blocks were done, in order."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.queue = WorkQueue(self.clock)
        self.done: list[str] = []

    def work(self, name: str, blocks: int, *, seconds: float = 0.0) -> Work:
        for _ in range(blocks):
            self.done.append(name)
            self.clock.advance(seconds)
            yield WorkStep.DONE

    def parked(self, name: str) -> Work:
        self.done.append(f"{name} waits")
        yield WorkStep.PARK
        self.done.append(f"{name} goes on")

    def turn(self) -> list[str]:
        self.done.clear()
        self.queue.turn()
        return list(self.done)


@pytest.fixture
def w() -> Watched:
    return Watched()


def test_a_turn_is_so_many_blocks_and_what_it_cuts_off_goes_on_first(w: Watched) -> None:
    w.queue.add(w.work("long", TURN_BLOCKS + 1), w.work("short", 1))
    assert w.turn() == ["long"] * TURN_BLOCKS and w.queue.more
    assert w.turn() == ["long", "short"]
    assert w.turn() == [] and not w.queue.more


def test_a_turn_ends_when_its_time_is_up_whatever_is_done_in_it(w: Watched) -> None:
    w.queue.add(w.work("slow", 4, seconds=TURN_S / 2))
    assert [w.turn() for _ in range(3)] == [["slow"] * 2, ["slow"] * 2, []]


def test_work_has_half_of_the_time_of_a_loop_that_takes_long(w: Watched) -> None:
    """Its thread waits for the interpreter wherever it looks for messages, while others open blocks."""
    w.queue.add(w.work("ask", 1000, seconds=TURN_S / 4))
    assert len(w.turn()) == 4
    w.clock.advance(3 * TURN_S)
    assert len(w.turn()) == pytest.approx(3 * 4, abs=1)
    w.clock.advance(2 * MAX_TURN_S)
    assert len(w.turn()) == pytest.approx(4 * MAX_TURN_S / TURN_S, abs=1)


def test_a_loop_that_had_nothing_to_do_begins_with_a_short_turn(w: Watched) -> None:
    w.queue.add(w.work("first", 1))
    w.turn()
    w.clock.advance(10 * TURN_S)
    w.queue.add(w.work("slow", 100, seconds=TURN_S / 1.5))
    assert w.turn() == ["slow"] * 2


def test_work_without_blocks_counts_as_one(w: Watched) -> None:
    def empty() -> Iterator[WorkStep]:
        w.done.append("empty")
        yield from ()

    w.queue.add(*(empty() for _ in range(TURN_BLOCKS + 1)))
    assert [len(w.turn()) for _ in range(2)] == [TURN_BLOCKS, 1]


def test_what_is_parked_goes_on_when_a_slab_has_come_or_its_time_is_over(w: Watched) -> None:
    w.queue.add(w.parked("one"))
    assert w.turn() == ["one waits"]
    w.clock.advance(ROOM_WAIT_S / 2)
    w.queue.add(w.parked("two"))
    assert w.turn() == ["two waits"] and not w.queue.more
    assert w.queue.next_moment == ROOM_WAIT_S
    w.clock.advance(ROOM_WAIT_S / 2)
    assert w.turn() == ["one goes on"]
    w.queue.room_changed()
    assert w.queue.more
    assert w.turn() == ["two goes on"] and w.queue.next_moment is None


def test_a_walk_has_what_engines_leave_and_a_little_in_any_case(w: Watched) -> None:
    w.queue.walk(w.work("walk", 3 * TURN_BLOCKS))
    assert w.turn() == ["walk"] * TURN_BLOCKS
    w.queue.add(w.work("ask", 2))
    assert w.turn() == ["ask"] * 2 + ["walk"] * (TURN_BLOCKS - 3), "an end counts as a block"
    w.queue.add(w.work("ask", 2 * TURN_BLOCKS))
    assert w.turn() == ["ask"] * TURN_BLOCKS + ["walk"] * WALK_BLOCKS
    w.queue.add(w.work("another", 1))
    assert w.turn() == ["ask"] * TURN_BLOCKS + ["walk"] * WALK_BLOCKS
    assert w.turn()[0] == "another"
