"""Names of tiers, which every part has to know."""

from __future__ import annotations

from collections.abc import Mapping

HOST = "host"
"""The tier that engines copy from and to: the arena."""


def tiers_below(stats: Mapping[str, int | float | str]) -> list[str]:
    """Names of the tiers below the host tier of the well that these `stats` are of, the uppermost first. None in what
    the well tells a tenant."""
    return [tier for tier in str(stats.get("tiers", "")).split(",")[1:] if tier]
