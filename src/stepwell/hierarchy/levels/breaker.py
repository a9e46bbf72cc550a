"""A circuit breaker for one kind of call of a tier, reads or writes: it says whether the tier is asked at all.

    CLOSED ──three calls in a row failed, or one is overdue──► OPEN ──a pause is over and nothing overdue──► HALF_OPEN
      ▲                                                         ▲                                                │
      │                                                         └────────────it failed, or is overdue────────────┤
      └──────────────────────────────────the one call that it admits was answered────────────────────────────────┘

No request waits for an open breaker: it is answered, and its engine computes. The breaker closes by itself, by calls
that engines cause anyway: the first call of HALF_OPEN is a recall or spill, which has limits of its own. (M. Nygard,
"Release It!", 2007, chapter 5.)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import inf

from stepwell.io.clock import Clock

OVERDUE_S = 1.0
"""A call that has not ended after so many seconds is overdue."""

FAILURES = 3
"""Calls in a row that failed open the breaker."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds without calls: the first after a good time, doubled each time that the tier fails again."""


class State(Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Verdict(Enum):
    """The device's part in the end of a call."""

    ANSWERED = "answered"
    FAILED = "failed"
    NOTHING = "nothing"  # it was not asked: there was no room, say


def verdict(answered: bool, failed: bool) -> Verdict:
    """The verdict on a call of which some part was answered or failed."""
    return Verdict.ANSWERED if answered else Verdict.FAILED if failed else Verdict.NOTHING


class Breaker:
    """`moved(state, why)` is called at each change. Each look at the state takes the time into account; `next_moment`
    says when the next look is due."""

    def __init__(self, clock: Clock, moved: Callable[[State, str], None]) -> None:
        self._clock = clock
        self._moved = moved
        self._state = State.CLOSED
        self._calls: dict[int, float] = {}  # when each began; the oldest is the first
        self._failed = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0

    @property
    def state(self) -> State:
        now = self._clock.now()
        if self._overdue(now):
            if self._state is not State.OPEN:
                self._open(now, f"no answer for {OVERDUE_S:g} s")
        elif self._state is State.OPEN and now >= self._until:
            self._move(State.HALF_OPEN, "it is asked again")
        return self._state

    @property
    def admits(self) -> bool:
        """One more call may begin."""
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._calls)

    @property
    def next_moment(self) -> float | None:
        """When the state may change by time alone."""
        if self._state is State.OPEN:
            return None if self._overdue(self._clock.now()) else self._until
        return next((began + OVERDUE_S for began in self._calls.values()), None)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest call that has not ended began; 0: all have."""
        return next((self._clock.now() - began for began in self._calls.values()), 0.0)

    def began(self, call: int) -> None:
        self._calls[call] = self._clock.now()

    def ended(self, call: int, verdict: Verdict) -> None:
        state, now = self.state, self._clock.now()
        del self._calls[call]
        match verdict:
            case Verdict.ANSWERED:
                self._failed = 0
                if state is State.HALF_OPEN:
                    self._pause_s = FIRST_PAUSE_S
                    self._move(State.CLOSED, "it answers")
            case Verdict.FAILED:
                self._failed += 1
                if state is State.HALF_OPEN or (state is State.CLOSED and self._failed >= FAILURES):
                    self._open(now, f"{self._failed} calls in a row failed")

    def _overdue(self, now: float) -> bool:
        return now >= next(iter(self._calls.values()), inf) + OVERDUE_S

    def _open(self, now: float, why: str) -> None:
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._move(State.OPEN, why)

    def _move(self, state: State, why: str) -> None:
        self._state = state
        self._moved(state, why)
