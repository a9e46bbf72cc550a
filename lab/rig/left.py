"""What processes have left behind on this machine: other processes, and names in shared memory."""

from __future__ import annotations

from pathlib import Path

_SHARED = Path("/dev/shm")


def processes(naming: Path) -> list[int]:
    """Living processes that have this path on their command line."""
    return [pid for pid in _living() if str(naming).encode() in _read(f"/proc/{pid}/cmdline")]


def shared_memory() -> set[str]:
    """Names in shared memory that no living process has mapped. Semaphores do not tell who has them; they are
    multiprocessing's, which stepwell does not use."""
    names = {path.name for path in _SHARED.iterdir() if not path.name.startswith("sem.")}
    mapped = b"\n".join(_read(f"/proc/{pid}/maps") for pid in _living())
    return {name for name in names if f"{_SHARED}/{name}".encode() not in mapped}


def _living() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""  # it ended meanwhile
