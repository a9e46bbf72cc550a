"""The cost of prefill by namespace, saved in home, so that the next well need not learn it.

Only tags and costs are kept: tags are keyed and tell nothing of models. A file that cannot be written or read costs the
next well a few requests that it recalls without knowing whether that is worth it.
"""

from __future__ import annotations

from pathlib import Path

from stepwell.hierarchy.saved import Calibrations
from stepwell.hierarchy.sessions.costs import MAX_NAMESPACES
from stepwell.policies.costs.prefill import PrefillCost
from stepwell.serve.home.state_file import StateFile, StateWriter

COSTS_NAME = "costs.json"
"""Name of the file in home. Its content, by each namespace's tag in hexadecimal digits: seconds of a step, of a token
and of a pair of tokens, and the most tokens of a step. Impossible values are left out when they are used."""


class CostList(StateFile):
    """The list of `home`, whose lock the caller holds."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, COSTS_NAME, "the next well will learn the costs of prefill anew")

    def read(self) -> dict[bytes, PrefillCost]:
        """The saved costs; none where they cannot be read."""
        try:
            rows = [(bytes.fromhex(tag), *costs) for tag, costs in (self.load() or {}).items()]
            found = {tag: PrefillCost(float(a), float(b), float(c), int(most)) for tag, a, b, c, most in rows}
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            self.damaged(error)
            return {}
        return dict(list(found.items())[-MAX_NAMESPACES:])

    def keep(self, learned: Calibrations, keeper: StateWriter) -> None:
        """Queues the costs to be written."""
        rows = {tag.hex(): [c.step_s, c.token_s, c.pair_s, c.step_tokens] for tag, c in learned.items()}
        keeper.keep(self, rows)
