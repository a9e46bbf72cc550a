"""Memory that this process may still use, and the default size of a well's host tier.

The total of the machine is the wrong number in a container. The limit is the tightest of the memory control groups
above this process, of version 1 or 2, and of the memory that the machine has available. Standard library only. The
`system` parameter replaces "/" in tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stepwell.errors import Unsupported
from stepwell.io.mounts import SYSTEM, mounts

DEFAULT_SHARE = 4  # one part in four
MAX_DEFAULT_BYTES = 16 << 30
STEP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Names:
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


# memory.high counts as a limit: above it the kernel throttles every process of the group.
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def memory_allowed(system: Path = SYSTEM) -> int:
    """Bytes that this process could use in addition, at this moment, without reclaiming other processes' memory.

    The least of MemAvailable and of limit minus usage in each control group above this process; file cache that the
    kernel gives back at once (inactive_file) is not counted as usage. Never negative. Raises Unsupported SW-701 where
    /proc/meminfo does not say.
    """
    groups = [_room(group, names) for group, names in _groups(system)]
    return max(0, min([_available(system), *(room for room in groups if room is not None)]))


def default_host_bytes(system: Path = SYSTEM) -> int:
    """A quarter of `memory_allowed`, at most 16 GiB, rounded down to 16 MiB; 0 where there is next to nothing."""
    share = min(memory_allowed(system) // DEFAULT_SHARE, MAX_DEFAULT_BYTES)
    return share - share % STEP_BYTES


def _available(system: Path) -> int:
    try:
        for line in (system / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
        why = "/proc/meminfo has no MemAvailable"
    except (OSError, ValueError, IndexError) as error:
        why = f"/proc/meminfo cannot be read: {error}"
    raise Unsupported("SW-701", what="the free memory is not known", why=why, fix="run on Linux 3.14 or later")


def _groups(system: Path) -> Iterator[tuple[Path, _Names]]:
    """The memory control groups of this process, from its own up to the topmost that is visible."""
    try:
        lines = (system / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts(system):
            if controllers and mount.kind == "cgroup" and "memory" in mount.options:
                names = _V1
            elif not controllers and mount.kind == "cgroup2":
                names = _V2
            else:
                continue
            top = system / mount.point.lstrip("/")
            yield from ((group, names) for group in _upwards(top, mount.root, path))
            break


def _upwards(top: Path, root: str, path: str) -> Iterator[Path]:
    # In a container without a cgroup namespace the path is the host's, and the mount shows only the part below `root`.
    try:
        below = PurePosixPath(path).relative_to(root)
    except ValueError:
        below = PurePosixPath()
    for length in range(len(below.parts), -1, -1):
        yield top.joinpath(*below.parts[:length])


def _room(group: Path, names: _Names) -> int | None:
    limits = [limit for name in names.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / names.usage)
    if not limits or usage is None:
        return None
    return min(limits) - max(0, usage - _statistic(group / "memory.stat", names.reclaimable))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent at the top of the hierarchy, and "max" where there is no limit
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return 0
    return 0
