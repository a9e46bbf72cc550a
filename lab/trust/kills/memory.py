"""A control group with a limit of memory, of version 1 or 2, for one process at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.rig.well import until

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    folder: Path
    limit: str
    used: str
    most: str
    events: str

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def allow(self, nbytes: int) -> None:
        (self.folder / self.limit).write_text(str(nbytes))

    def empty(self) -> None:
        """Whatever runs in it goes on outside."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (self.folder.parent / "cgroup.procs").write_text(pid)

    def kills(self) -> int:
        """How often the kernel has killed a process of it for its memory."""
        told = dict(line.split() for line in (self.folder / self.events).read_text().splitlines())
        return int(told["oom_kill"])

    def used_bytes(self) -> int:
        return int((self.folder / self.used).read_text())

    def most_bytes(self) -> int:
        """The most that was ever used in it, what the kernel would give back at once included."""
        return int((self.folder / self.most).read_text())


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """A new one without a limit, gone at the end. Raises OSError where none can be made, as for anybody but root."""
    name = f"stepwell-trust-{os.getpid()}"
    if (_V1 / "memory.limit_in_bytes").exists():
        made = Group(
            _V1 / name,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "memory.max_usage_in_bytes",
            "memory.oom_control",
        )
    else:
        made = Group(_V2 / name, "memory.max", "memory.current", "memory.peak", "memory.events")
    made.folder.mkdir()
    try:
        made.most_bytes()  # the controller is there
        yield made
    finally:
        until(lambda: _removed(made.folder), 10)


def why_not() -> str:
    """Why no group can be made here; empty if one can."""
    try:
        with group():
            return ""
    except OSError as error:
        return f"no control group of memory can be made: {error.strerror}"


def _removed(folder: Path) -> bool:
    """Not while a process that was killed in it is still going."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
