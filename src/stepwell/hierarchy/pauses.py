"""What the operator has switched off: recalls, spills or both, until they are resumed.

Looked at wherever something of that kind would begin; what has begun goes its way to the end. Blocks stay where they
are. Why so: docs/design/adr/0022-an-off-switch.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stepwell.events import PauseChanged, Sink

Kind = Literal["recalls", "spills"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PAUSED = "paused"
"""Why a request is answered with a miss, and why a spill is refused."""

MOST_REASON = 200
"""Characters of a reason."""

_LAST = 253402300799.0  # of the year 9999


@dataclass(frozen=True, slots=True)
class Pause:
    """`since`: seconds since 1970. `uid`: the user who asked for it. `reason`: theirs, one line, may be empty."""

    kind: Kind
    since: float
    uid: int
    reason: str = ""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(self.since, 0.0), _LAST)))
        return f"{self.kind} since {when} by user {self.uid}" + (f": {self.reason}" if self.reason else "")


class Pauses:
    """`earlier`: what was paused when the well before ended. `keep` is told of all that is paused, whenever somebody
    asks to pause or resume; it must not block."""

    def __init__(self, emit: Sink, earlier: Iterable[Pause], keep: Callable[[Sequence[Pause]], None]) -> None:
        self._emit = emit
        self._keep = keep
        self._paused: dict[Kind, Pause] = {pause.kind: pause for pause in earlier}

    @property
    def recalls(self) -> bool:
        return "recalls" in self._paused

    @property
    def spills(self) -> bool:
        return "spills" in self._paused

    @property
    def all(self) -> list[Pause]:
        return [self._paused[kind] for kind in KINDS if kind in self._paused]

    def pause(self, pause: Pause) -> bool:
        """False: it was paused already, and stays as it was: since then, by that user, for that reason."""
        fresh = pause.kind not in self._paused
        if fresh:
            self._paused[pause.kind] = pause
            self._emit(PauseChanged(pause.kind, True, pause.uid, pause.reason))
        self._keep(self.all)
        return fresh

    def resume(self, kind: Kind, uid: int) -> bool:
        """False: it was not paused."""
        fresh = self._paused.pop(kind, None) is not None
        if fresh:
            self._emit(PauseChanged(kind, False, uid, ""))
        self._keep(self.all)
        return fresh


def one_line(reason: str) -> str:
    """A person's reason, made fit for a log and a file."""
    return "".join(c if c.isprintable() else "?" for c in reason.strip())[:MOST_REASON]
