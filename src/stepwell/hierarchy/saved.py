"""State that outlives a well: namespaces in quarantine, costs of prefill, and pauses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from stepwell.policies.costs.prefill import PrefillCost

Tags = tuple[bytes, ...]
"""One namespace: its tag under each of its tenant's key epochs, newest first."""

Calibrations = Mapping[bytes, PrefillCost]
"""Costs of prefill by the namespace's tag, the latest last."""

Kind = Literal["recalls", "spills"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_LAST = 253402300799.0  # of the year 9999


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """`since`: seconds since 1970. `uid`: the user who asked for it. `reason`: theirs, one line, may be empty."""

    kind: Kind
    since: float
    uid: int
    reason: str = ""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(self.since, 0.0), _LAST)))
        return f"{self.kind} since {when} by user {self.uid}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class SavedState:
    """State that an earlier well has left. `barred`: namespaces in quarantine."""

    barred: Sequence[Tags] = ()
    calibrations: Calibrations = field(default_factory=dict)
    paused: Sequence[PauseRecord] = ()


class StateStore:
    """Keeps state for the next well; this one keeps nothing. Each call is given all that there is of its kind, and must
    not block."""

    def save_barred(self, barred: Sequence[Tags]) -> None:
        pass

    def save_calibrations(self, calibrations: Calibrations) -> None:
        pass

    def save_paused(self, paused: Sequence[PauseRecord]) -> None:
        pass
