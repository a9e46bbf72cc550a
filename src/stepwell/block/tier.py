"""Names of tiers and the figures of a well by tier, which every part has to know."""

from __future__ import annotations

import msgspec

HOST = "host"
"""The tier that engines copy from and to: the arena."""

Figures = dict[str, int | float | str]


class WellStats(msgspec.Struct, frozen=True):
    """What a well holds and has counted: `well` of itself and its host tier, `tiers` of each tier below, by name, the
    uppermost first; a tier that keeps nothing has none."""

    well: Figures
    tiers: dict[str, Figures] = {}

    def flat(self) -> Figures:
        """One table, as `stepwell stats --json` prints it: figures of a tier have its name before theirs."""
        below = {f"{tier}_{name}": value for tier, of in self.tiers.items() for name, value in of.items()}
        return {**self.well, **below}
