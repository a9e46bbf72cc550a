"""Canaries of a real vLLM: the trust programme's own run of them, of a size for every day."""

from __future__ import annotations

from lab.trust.budget import Budget
from lab.trust.canary import engine

CANARIES = 24


def test_rounding_is_no_alarm_and_other_weights_are() -> None:
    rows = list(engine.run(Budget(seed=1, scale=CANARIES / 10_000)))
    for row in rows:
        print(row)
    assert [row.promise for row in rows] == [engine.CLEAN, engine.TRIPPED]
    assert rows[0].cases >= CANARIES
    assert [row.violations for row in rows] == [0, 0]
