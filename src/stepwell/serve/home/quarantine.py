"""The namespaces in quarantine, saved in home: a well that starts again must not trust them.

Only tags are saved, which are keyed and reveal nothing of models. If the list cannot be written or read, the next well
does not know of the quarantine; this one serves on. Its blocks were dropped when the quarantine began, and a canary
finds what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepwell.config.access import MAX_TENANTS
from stepwell.hierarchy.saved import Tags
from stepwell.hierarchy.sessions.canaries import MAX_NAMESPACES
from stepwell.serve.home.state_file import StateFile, StateWriter

LIST_NAME = "quarantine.json"
"""Name of the file in home. Its content: a list of namespaces, each a list of its tags in hexadecimal digits."""

MAX_LISTED = (1 + MAX_TENANTS) * MAX_NAMESPACES
"""Namespaces that are taken from the file: the latest."""


class QuarantineList(StateFile):
    """The list of `home`, whose lock the caller holds."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, LIST_NAME, "the quarantine will not outlive this well")

    def read(self) -> list[Tags]:
        """The saved namespaces; none where they cannot be read."""
        try:
            barred = [tuple(map(bytes.fromhex, tags)) for tags in self.load() or []]
        except (ValueError, TypeError) as error:
            self.damaged(error)
            return []
        return [tags for tags in barred if tags][-MAX_LISTED:]

    def keep(self, barred: Sequence[Tags], keeper: StateWriter) -> None:
        """Queues the list to be written."""
        keeper.keep(self, [[tag.hex() for tag in tags] for tags in barred])
