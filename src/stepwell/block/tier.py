"""Names of tiers that every part has to know."""

from __future__ import annotations

HOST = "host"
"""The tier that engines copy from and to: the arena."""
