"""Decisions on recalls whose outcome is still awaited, and what is known of the engines that they are made for."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.policies.decide import Decision, RecallMode, RecallQuestion

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
    that the request had asked for. `rest_s`: seconds of computing that the decision leaves to the engine."""

    number: int
    load: EngineLoad
    question: RecallQuestion
    mode: RecallMode
    decision: Decision
    began: float
    landed_at: float
    landed: int
    rest_s: float
    gave_up: str = ""
