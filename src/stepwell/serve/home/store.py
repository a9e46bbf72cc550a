"""The well's state in its home: read when it begins, written beside its work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepwell.hierarchy.saved import Calibrations, PauseRecord, SavedState, StateStore, Tags
from stepwell.serve.home.calibration import CostList
from stepwell.serve.home.pauses import PauseList
from stepwell.serve.home.quarantine import QuarantineList
from stepwell.serve.home.state_file import StateWriter


class HomeStore(StateStore):
    """Keeps it in the files of `home`, whose lock the caller holds."""

    def __init__(self, home: Path) -> None:
        self._keeper = StateWriter()
        self._quarantine, self._costs, self._pauses = QuarantineList(home), CostList(home), PauseList(home)

    def load(self) -> SavedState:
        """What an earlier well has left, as far as it can be read."""
        return SavedState(self._quarantine.read(), self._costs.read(), self._pauses.read())

    def save_barred(self, barred: Sequence[Tags]) -> None:
        self._quarantine.keep(barred, self._keeper)

    def save_calibrations(self, calibrations: Calibrations) -> None:
        self._costs.keep(calibrations, self._keeper)

    def save_paused(self, paused: Sequence[PauseRecord]) -> None:
        self._pauses.keep(paused, self._keeper)

    @property
    def pauses_saved(self) -> bool:
        """The pauses that were saved last are on disk."""
        return self._pauses.kept

    def close(self, seconds: float) -> bool:
        """Writes what waits. False: home does not answer, and is not waited for any longer."""
        return self._keeper.close(seconds)
