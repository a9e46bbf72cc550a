"""Which namespaces are in quarantine, written down in home: a well that starts again must not trust them.

Only tags are kept, which are keyed and tell nothing of models. A list that cannot be written or read costs the next
well its memory of the quarantine, never this one its service: its blocks are dropped when it begins, and a canary finds
what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepwell.config.access import MAX_TENANTS
from stepwell.hierarchy.saved import Tags
from stepwell.hierarchy.sessions.canaries import MAX_NAMESPACES
from stepwell.serve.home.state_file import StateFile, StateWriter

LIST_NAME = "quarantine.json"
"""Of the file in home: a list of namespaces, each a list of its tags in hexadecimal digits."""

NEW_LIST_NAME = f"{LIST_NAME}.new"
"""Of what a killed process may have left half written; the next one writes over it."""

MAX_LISTED = (1 + MAX_TENANTS) * MAX_NAMESPACES
"""That are believed: the latest."""


class QuarantineList(StateFile):
    """The list of `home`, whose lock the caller holds."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, LIST_NAME, NEW_LIST_NAME, "the quarantine will not outlive this well")

    def read(self) -> list[Tags]:
        """What was written last; nothing where that cannot be read."""
        try:
            barred = [tuple(map(bytes.fromhex, tags)) for tags in self.load() or []]
        except (ValueError, TypeError) as error:
            self.damaged(error)
            return []
        return [tags for tags in barred if tags][-MAX_LISTED:]

    def keep(self, barred: Sequence[Tags], keeper: StateWriter) -> None:
        """Has it written, beside the well's work."""
        keeper.keep(self, [[tag.hex() for tag in tags] for tags in barred])
