"""The simulated tier that recalls share, in cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from lab.sim.turns.line import BATCH, ORDERS, waits

LONG_THEN_SHORT = [(0.0, 10 * BATCH), (0.5, 2 * BATCH)]


@pytest.mark.parametrize(
    ("order", "ends"), [("queue", (10, 12)), ("round robin", (12, 5)), ("shortest", (12, 3)), ("turns", (12, 3))]
)
def test_a_short_recall_behind_a_long_one(order: str, ends: tuple[int, int]) -> None:
    assert waits(LONG_THEN_SHORT, ORDERS[order](), 1 / BATCH).tolist() == [ends[0], ends[1] - 0.5]


def test_what_the_tier_was_asked_for_already_goes_first() -> None:
    assert waits(LONG_THEN_SHORT, ORDERS["shortest"](), 1 / BATCH, ahead=2 * BATCH).tolist() == [12, 4.5]


def test_what_has_no_room_is_not_in_line() -> None:
    assert waits(LONG_THEN_SHORT, ORDERS["shortest"](), 1 / BATCH, room=11 * BATCH).tolist() == [10, 11.5]
