"""Names of tiers, which every part has to know."""

from __future__ import annotations

from collections.abc import Mapping

HOST = "host"
"""The tier that engines copy from and to: the arena."""

_CAPACITY = "_capacity_bytes"
"""A figure that only tiers below the host tier have, behind their names."""


def tiers_below(stats: Mapping[str, int | float | str]) -> list[str]:
    """Names of the tiers below the host tier of the well that these `stats` are of, the uppermost first. A well of an
    older version does not name them: those that have a capacity."""
    if "tiers" in stats:
        return [tier for tier in str(stats["tiers"]).split(",")[1:] if tier]
    return [key.removesuffix(_CAPACITY) for key in stats if key.endswith(_CAPACITY)]
