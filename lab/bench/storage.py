"""What benchmarks of a disk need: quiet, and how much really came from the device."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

QUIET_S, QUIET_LIMIT_S = 0.5, 60.0
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that processes had the storage layer read and write so far; reads from the page cache are not among them,
    writes to it are."""

    read: int
    written: int


def moved(pids: Iterable[int]) -> Moved:
    """Of all these processes together; those that have ended are left out."""
    read = written = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            values = dict(line.split(": ") for line in lines)
            read += int(values["read_bytes"])
            written += int(values["write_bytes"])
    return Moved(read, written)


def wait_quiet(written: Callable[[], int], quiet_s: float = QUIET_S, limit_s: float = QUIET_LIMIT_S) -> bool:
    """Waits until `written` has not grown for `quiet_s`: background writes have ended. False at the limit."""
    before, since, deadline = written(), time.monotonic(), time.monotonic() + limit_s
    while time.monotonic() - since < quiet_s:
        if time.monotonic() > deadline:
            return False
        time.sleep(quiet_s / 10)
        if (now := written()) != before:
            before, since = now, time.monotonic()
    return True


def shared_files(pids: Iterable[int]) -> set[Path]:
    """Named files in shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/")[1] + line.partition("/")[2]
                if name.startswith(_SHARED_MEMORY) and not name.endswith(" (deleted)"):
                    found.add(Path(name))
    return found


def remove_left(files: Iterable[Path]) -> int:
    """Unlinks those that are still there, and returns their bytes: call it when all who mapped them have ended."""
    total = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
            path.unlink()
    return total


def filesystem(folder: Path) -> str:
    """Of which kind it is, and on what: "ext4 on vda (no rotating disk)"."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    kind = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            kind = rest.split()[0]
    block = Path("/sys/dev/block", device)
    if not block.exists():
        return f"{kind}, on no block device of its own"
    disk = block.resolve()
    disk = disk if (disk / "queue").exists() else disk.parent
    with contextlib.suppress(OSError):
        rotates = (disk / "queue/rotational").read_text().strip() == "1"
        return f"{kind} on {disk.name} ({'a rotating disk' if rotates else 'no rotating disk'})"
    return f"{kind} on {disk.name}"
