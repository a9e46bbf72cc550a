"""The mounts of this process, as the kernel lists them in /proc/self/mountinfo.

Read by `paths` (what filesystem is this?) and `host` (where are the control groups?). A line that cannot be
understood is skipped; a missing list is an empty one, and the callers then know less and refuse less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/")


@dataclass(frozen=True, slots=True)
class Mount:
    """`root` within the mounted filesystem appears at `point`; `options` are those of the filesystem itself."""

    root: str
    point: str
    kind: str
    options: frozenset[str]


def mounts(system: Path = SYSTEM) -> list[Mount]:
    """All mounts in mount order. `system` replaces "/" in tests."""
    try:
        text = (system / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        # 36 35 98:0 /root /point rw,noatime shared:1 - kind source rw,errors=continue
        left, _, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if len(head) >= 6 and len(tail) >= 3:
            found.append(Mount(_unescape(head[3]), _unescape(head[4]), tail[0], frozenset(tail[2].split(","))))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
