"""Checks of a part's parameters when it is made, not in the middle of a generation."""

from __future__ import annotations

from stepwell.errors import ConfigError


def require(holds: bool, part: object, why: str) -> None:
    """Raises ConfigError SW-102 unless it holds. `why`: what must hold, as half a sentence."""
    if not holds:
        raise ConfigError(
            "SW-102",
            what=f"{part} cannot be part of a policy",
            why=why,
            fix="change the figure in the policy",
        )


def require_share(share: float, part: object, name: str) -> None:
    require(0.0 < share <= 1.0, part, f"{name} is a share of the context: above 0, at most 1")
