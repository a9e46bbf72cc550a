"""Decisions on recalls: those whose outcome is still awaited, what is known of the engines that they are made for, and
the last ones with how they went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from stepwell.events import Event, RecallDecided, RecallEnded
from stepwell.policies.decide import Decision, RecallMode, RecallQuestion

KEPT = 256
"""Decisions that are remembered with how they went."""

MAX_BACKLOG_S = 60.0
"""Longest backlog credited to an engine, in seconds."""


@dataclass(slots=True, eq=False)
class EngineLoad:
    """One engine's backlog: `until` is when it will have computed what earlier requests left to it, on the well's
    clock. `tag` names the namespace whose costs apply."""

    tag: bytes
    until: float = 0.0

    def busy_s(self, now: float) -> float:
        """Seconds until the engine has computed its backlog."""
        return max(0.0, self.until - now)

    def compute(self, now: float, seconds: float) -> None:
        """Adds work to the backlog, up to MAX_BACKLOG_S."""
        self.until = min(max(now, self.until) + seconds, now + MAX_BACKLOG_S)


@dataclass(slots=True, eq=False)
class OpenDecision:
    """A decision on one request, from when it is made until the request ends. `landed_at`: when the last block came
    that the request had asked for. `rest_s`: seconds of computing that the decision leaves to the engine. `stake_s`:
    seconds that giving up then costs, what has not landed being computed; 0 while that is unknown. `spare`: blocks at
    the end of what was found that the engine computes again in any case."""

    number: int
    load: EngineLoad
    question: RecallQuestion
    mode: RecallMode
    decision: Decision
    began: float
    landed_at: float
    landed: int
    rest_s: float
    stake_s: float
    gave_up: str = ""
    spare: int = 0


class DecisionLog:
    """A sink of events that keeps the last KEPT decisions."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[RecallDecided, RecallEnded | None]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        match event:
            case RecallDecided(number):
                self._kept[number] = event, None
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            case RecallEnded(number) if number in self._kept:
                self._kept[number] = self._kept[number][0], event
            case _:
                pass

    def latest(self, most: int) -> list[tuple[RecallDecided, RecallEnded | None]]:
        """The latest first."""
        return list(self._kept.values())[::-1][: max(most, 0)]
