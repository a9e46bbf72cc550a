"""The operator's off switch: recalls, spills or both, until they are resumed.

It is looked at wherever something of that kind would begin; what has begun ends as usual. Blocks stay where they
are. Why so: docs/design/adr/0022-an-off-switch.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.events import PauseChanged, Sink
from stepwell.hierarchy.saved import KINDS, Kind, PauseRecord, StateStore

PAUSED = "paused"
"""Reason of a request's miss and of a refused spill."""

MAX_REASON = 200
"""Characters of a reason."""


class Pauses:
    """`earlier`: what was paused when the well before ended. Each request to pause or resume saves the list, so
    that a repeated one makes up for a save that has failed."""

    def __init__(self, emit: Sink, earlier: Iterable[PauseRecord], store: StateStore) -> None:
        self._emit = emit
        self._store = store
        self._paused: dict[Kind, PauseRecord] = {pause.kind: pause for pause in earlier}

    @property
    def recalls(self) -> bool:
        return "recalls" in self._paused

    @property
    def spills(self) -> bool:
        return "spills" in self._paused

    @property
    def all(self) -> list[PauseRecord]:
        return [self._paused[kind] for kind in KINDS if kind in self._paused]

    def pause(self, pause: PauseRecord) -> bool:
        """False: it was paused already, and stays as it was: since then, by that user, for that reason."""
        fresh = pause.kind not in self._paused
        if fresh:
            self._paused[pause.kind] = pause
            self._emit(PauseChanged(pause.kind, True, pause.uid, pause.reason))
        self._store.save_paused(self.all)
        return fresh

    def resume(self, kind: Kind, uid: int) -> bool:
        """False: it was not paused."""
        fresh = self._paused.pop(kind, None) is not None
        if fresh:
            self._emit(PauseChanged(kind, False, uid, ""))
        self._store.save_paused(self.all)
        return fresh


def one_line(reason: str) -> str:
    """The reason as one short line that is safe in a log and a file."""
    return "".join(c if c.isprintable() else "?" for c in reason.strip())[:MAX_REASON]
