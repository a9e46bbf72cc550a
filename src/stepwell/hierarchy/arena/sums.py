"""What an arena holds, summed up as it changes, so that asking costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Sums:
    """Kept up to date with every change. `blocks` are resident ones."""

    blocks: int = 0
    block_bytes: int = 0
    filling: int = 0
    leased_blocks: int = 0
    quarantined_slots: int = 0
