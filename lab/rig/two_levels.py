"""A well as `stepwell serve` runs it, with a stand-in for a remote tier below its disk.

`python -m lab.rig.two_levels HOME HOST DISK`, the latter two as in the settings. What the remote tier holds ends with
the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.config import load
from stepwell.hierarchy.core import Limits, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.serve import process
from stepwell.testing.remote_tier import RemoteTier
from stepwell.tiers.base import Tier

REMOTE_BYTES = 1 << 30


class TwoLevels(Hierarchy):
    def __init__(self, limits: Limits, system: System, *rest: Any, tiers: Sequence[Tier], **named: Any) -> None:
        remote = RemoteTier(REMOTE_BYTES, system.executor, {})
        super().__init__(limits, system, *rest, tiers=(*tiers, remote), **named)


def main() -> int:
    home, host, disk = sys.argv[1:]
    vars(process)["Hierarchy"] = TwoLevels
    settings = load(Path(home), {}, overrides={"host": host, "disk": disk, "linger": "1h"}).settings
    process.run(Path(home), settings, ready=lambda socket: print("serving", socket, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
