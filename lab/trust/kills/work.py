"""What is asked of a living well in all campaigns: its figures, a chain back, a chain to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.rig.well import until
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.lanes import Tally
from lab.trust.kills.processes import PATIENCE_S, Life
from stepwell.client import control
from stepwell.errors import StepwellError

HELD = ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots", "quarantined_sessions")
"""Figures of a well that are 0 when nothing is held for anybody."""


def stats(home: Path) -> dict[str, Any]:
    """Nothing where no well answers."""
    try:
        return control.stats(home, seconds=PATIENCE_S)
    except StepwellError:
        return {}


def joined(engine: Engine, life: Life, seconds: float = PATIENCE_S) -> bool:
    """Waits until it may ask and has slots; False if the well has ended, or in that time."""
    return until(lambda: engine.joined(0.05) or engine.lost or not life.alive(), seconds) and engine.joined(0.0)


def recovered(home: Path, life: Life, seconds: float = PATIENCE_S) -> bool:
    """Waits until the well knows what is on its disk; False as for `joined`."""
    return until(lambda: "disk_recovery_seconds" in stats(home) or not life.alive(), seconds) and life.alive()


def recall(engine: Engine, chain: Chain, tally: Tally, seconds: float = 5.0) -> int:
    """Blocks that are right; all others are misses, or violations of the kind `wrong`."""
    found = engine.recall(chain, seconds)
    tally.n.update(asked=chain.blocks, right=found.right, staged=found.staged, changed=found.changed)
    if found.wrong:
        tally.violated("wrong", f"{found.wrong} blocks of {chain} of model {engine.model}", found.wrong)
    return found.right


def stored(home: Path) -> int:
    """Blocks that this life has written to disk; -1 while any waits, or where no well answers."""
    figures = stats(home)
    return int(figures.get("disk_spilled_blocks", 0)) if figures.get("disk_write_queue_bytes") == 0 else -1
