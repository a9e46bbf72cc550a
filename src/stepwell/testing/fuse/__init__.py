"""Faulty disks: a pass-through filesystem with injected faults, spoken to the kernel over /dev/fuse.

    with FaultyDisk(directory) as disk:
        disk.set(Rule(op="read", name="*.seg", errno=errno.EIO))
        ...  # use disk.path
        disk.heal()

Needs root and /dev/fuse, no library: `why_not` names what is missing.
"""

from __future__ import annotations

from stepwell.testing.fuse.disk import FaultyDisk, why_not
from stepwell.testing.fuse.faults import FuseReport, Rule

__all__ = ["FaultyDisk", "FuseReport", "Rule", "why_not"]
