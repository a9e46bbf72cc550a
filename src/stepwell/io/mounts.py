"""The mounts of this process, as the kernel lists them in /proc/self/mountinfo.

Read by `paths` (what filesystem is this?), `host` (where are the control groups?), and by those who take a file's
times for proof that it has not changed (`unstamped`). A line that cannot be understood is skipped; a missing list is an
empty one: the callers then know less, refuse less, and take no times for proof.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/")

STAMPED = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs"})
"""Filesystems on which this kernel gives a file a new ctime with every change, which no user can set."""

_LOOP = "7:"
_LAYER = re.compile("(?:lowerdir|upperdir|datadir)[+]?=(.*)")
_MOST_DEEP = 8


@dataclass(frozen=True, slots=True)
class Mount:
    """`root` within the mounted filesystem appears at `point`; `options` are those of the filesystem itself, `device`
    is "major:minor"."""

    root: str
    point: str
    kind: str
    options: frozenset[str]
    device: str = ""


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
            options = frozenset(map(_unescape, tail[2].split(",")))
            found.append(Mount(_unescape(head[3]), _unescape(head[4]), tail[0], options, head[2]))
    return found


def covering(real: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that holds this path, which has no symbolic links in it; None if it is not known."""
    best: Mount | None = None
    for mount in table:
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount  # of two mounts at one point, the later one covers the earlier
    return best


def unstamped(path: Path, table: Sequence[Mount] | None = None) -> str:
    """The filesystem of this file, if an unchanged ctime does not prove unchanged content there; else "".

    It proves that on the filesystems in STAMPED only. Network filesystems and FUSE have times that a server makes up.
    Images (squashfs, erofs) and filesystems on loop devices have times chosen when they were built, and inode numbers
    that come again. An overlay counts as STAMPED if all its layers are seen to be, which in a container they
    are not: they are the host's.
    """
    return _unstamped(os.path.realpath(path), mounts() if table is None else table, _MOST_DEEP)


def _unstamped(real: str, table: Sequence[Mount], deep: int) -> str:
    mount = covering(real, table)
    if mount is None or not deep:
        return "unknown"
    if mount.kind == "overlay":
        layers = [_LAYER.fullmatch(option) for option in mount.options]
        folders = [folder for layer in layers if layer for folder in layer[1].split(":") if folder]
        below = [_layer(folder, mount, table, deep) for folder in folders] or ["unknown"]
        return next((f"overlay of {kind}" for kind in below if kind), "")
    if mount.device.startswith(_LOOP):
        return f"{mount.kind} in a file"
    return "" if mount.kind in STAMPED else mount.kind


def _layer(folder: str, overlay: Mount, table: Sequence[Mount], deep: int) -> str:
    real = os.path.realpath(folder)
    if not os.path.isdir(real) or covering(real, table) in (overlay, None):
        return "unknown"
    return _unstamped(real, table, deep - 1)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
