"""Checks of memory and limits: the arena against the control groups, shared memory, huge pages, descriptors."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from stepwell.config import Settings, check_host
from stepwell.errors import CapacityError
from stepwell.io import staging
from stepwell.io.host import default_host_bytes, memory_allowed
from stepwell.io.memory import PIECE, SharedMemory, SystemMemory
from stepwell.io.mounts import SYSTEM
from stepwell.ops.checks.check import Check, Facts
from stepwell.units import format_size
from stepwell.vault.memory import lock_limit, may_lock

SLAB_BYTES = 64 << 20
_TOUCHED = 8 << 20
_SLOW_SECONDS_PER_GIB = 5.0
_FEW_FILES, _TOO_FEW_FILES = 4096, 256
_THP = "sys/kernel/mm/transparent_hugepage/enabled"


def host(settings: Settings, held: int = 0, system: Path = SYSTEM) -> Iterator[Check]:
    """The arena against what may still be used; `held` bytes are those of the running well and count as free."""
    allowed = memory_allowed(system) + held
    wanted = default_host_bytes(system) if settings.host is None else settings.host.of(allowed)
    check_host(wanted, allowed)
    text = f"host {format_size(wanted)} of {format_size(allowed)} that this process's limits and the machine allow"
    yield Check("memory", "ok", text, facts={"host_bytes": wanted, "allowed_bytes": allowed})


@contextlib.contextmanager
def populated() -> Iterator[tuple[SharedMemory, float]]:
    """A slab of SLAB_BYTES as the well makes it, and how many seconds a GiB its first touch took: a sealed memfd,
    populated piece by piece, given back at the end. Raises CapacityError."""
    if memory_allowed() < 2 * SLAB_BYTES:
        raise CapacityError(
            "SW-202",
            what="no slab was tried",
            why="there is no memory left to try it",
            fix="free memory, or raise the memory limit",
        )
    slab = SystemMemory().make(SLAB_BYTES)
    try:
        before = time.perf_counter()
        for start in range(0, SLAB_BYTES, PIECE):
            slab.populate(start, min(PIECE, SLAB_BYTES - start))
        yield slab, (time.perf_counter() - before) * (1 << 30) / SLAB_BYTES
        slab.punch()
    finally:
        slab.close()


def shared() -> Iterator[Check]:
    """A slab can be had."""
    name = "shared-memory"
    with populated() as (_, seconds):
        pass
    facts = {"populate_seconds_per_gib": round(seconds, 3)}
    text = f"works; the first touch of a GiB takes {seconds:.2g} s"
    if seconds > _SLOW_SECONDS_PER_GIB:
        yield Check(name, "warn", text, "the first spills will be slow: is the machine short of memory?", facts=facts)
    else:
        yield Check(name, "ok", text, facts=facts)


def huge_pages(settings: Settings, system: Path = SYSTEM) -> Iterator[Check]:
    """Checks private huge pages, which make disk I/O cheap: the system's setting, and the pages that a mapping really
    gets."""
    try:
        said = (system / _THP).read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        said = "not there"
    buffer = staging.make(_TOUCHED)
    got = _anonymous_huge_bytes(buffer.ctypes.data, system)
    facts: Facts = {"transparent_hugepage": said, "huge_bytes": got, "touched_bytes": _TOUCHED}
    text = f"transparent_hugepage is {said}; {format_size(got)} of {format_size(_TOUCHED)} touched are huge pages"
    if got == _TOUCHED or not settings.disk:
        text += "" if settings.disk else " (needed only by a disk tier)"
        yield Check("huge-pages", "ok", text, facts=facts)
    else:
        fix = f"echo madvise > /{_THP}; without them disk I/O works, but costs several times the CPU"
        yield Check("huge-pages", "warn", text, fix, facts=facts)


def limits(settings: Settings, *, gpu_engine: bool) -> Iterator[Check]:
    """Checks RLIMIT_NOFILE, and RLIMIT_MEMLOCK where an engine's driver may pin slabs."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(files)} files may be open; two for each connection, one for each slab and segment"
    facts: Facts = {"open_files": files}
    fix = "raise it: LimitNOFILE= of the unit, or `ulimits: nofile` of the container"
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield Check("open-files", "fail" if files < _TOO_FEW_FILES else "warn", text, fix, facts=facts)
    else:
        yield Check("open-files", "ok", text, facts=facts)

    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts = {"locked_bytes": locked}
    unlimited = locked == resource.RLIM_INFINITY
    text = f"{'unlimited' if unlimited else format_size(locked)} may be locked"
    if unlimited or not gpu_engine:
        yield Check("locked-memory", "ok", text + ("" if unlimited else "; no GPU engine here needs more"), facts=facts)
    else:
        fix = "for engines on GPUs set it to unlimited: LimitMEMLOCK=infinity, or `ulimits: memlock: -1`"
        yield Check("locked-memory", "warn", text, fix, facts=facts)


def keys() -> Iterator[Check]:
    """A page for keys as the well holds them: locked, so that they never reach swap."""
    if may_lock():
        yield Check("locked-keys", "ok", "the memory that keys lie in can be kept from swap")
    else:
        text = f"memory cannot be locked ({max(lock_limit(), 0)} bytes are allowed): keys may be swapped to disk"
        fix = "LimitMEMLOCK=8M of the unit, or `ulimits: memlock` of the container; or no swap, or an encrypted one"
        yield Check("locked-keys", "warn", text, fix)


def _anonymous_huge_bytes(address: int, system: Path) -> int:
    """AnonHugePages of the mapping of this process that holds `address`."""
    inside = False
    for line in (system / "proc/self/smaps").read_text("utf-8", "replace").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, _, high = first.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and first == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
