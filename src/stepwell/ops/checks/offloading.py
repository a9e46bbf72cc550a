"""Checks of vLLM's own offloading, for a well below it: its interface, its host memory, what killed engines leave."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from importlib import util
from pathlib import Path

from stepwell.config import Settings
from stepwell.engines.vllm.settings import MIN_WINDOW
from stepwell.io.host import memory_allowed
from stepwell.io.mounts import SYSTEM
from stepwell.ops.checks.check import Check, Facts
from stepwell.units import format_size

SHARED = Path("/dev/shm")
_REGIONS = "vllm_offload_*.mmap"
_FACTORY = "v1/kv_offload/tiering/factory.py"
_NAMED = 8


def interface() -> Iterator[Check]:
    """The vLLM beside us takes tiers below its offloading. Its files are looked at and not imported; nothing is said
    where there is none."""
    vllm = util.find_spec("vllm")
    if vllm is None:
        return
    if any(Path(folder, _FACTORY).is_file() for folder in vllm.submodule_search_locations or ()):
        yield Check("engine-tiers", "ok", "vLLM's offloading takes a well as a tier below it")
    else:
        fix = "use StepwellConnector, or vLLM 0.31 or newer"
        yield Check("engine-tiers", "warn", "this vLLM's offloading takes no tiers, so no well can be below it", fix)


def memory(
    settings: Settings, cpu_bytes: int, held: int = 0, system: Path = SYSTEM, shared: Path = SHARED
) -> Iterator[Check]:
    """vLLM's host memory of this size, all of which an engine takes when it starts, fits beside the arena. `held` bytes
    are those of the running well and count as free."""
    allowed, of = memory_allowed(system) + held, os.statvfs(shared)
    host = MIN_WINDOW if settings.host is None else settings.host.of(allowed)
    free = of.f_bavail * of.f_frsize
    facts: Facts = {"cpu_bytes": cpu_bytes, "host_bytes": host, "allowed_bytes": allowed, "shared_free_bytes": free}
    text = (
        f"vLLM's {format_size(cpu_bytes)} in {shared} ({format_size(free)} free) and host {format_size(host)} of "
        f"{format_size(allowed)} that this process's limits and the machine allow"
    )
    if cpu_bytes > free:
        fix = "a larger /dev/shm (--shm-size or --ipc=host of the container), or a smaller cpu_bytes_to_use"
        yield Check("engine-memory", "fail", text, fix, facts=facts)
    elif cpu_bytes + host > allowed:
        fix = "a smaller cpu_bytes_to_use, or a smaller host, which chunks only pass through"
        yield Check("engine-memory", "fail", text, fix, facts=facts)
    else:
        yield Check("engine-memory", "ok", text, facts=facts)


def leftovers(shared: Path = SHARED) -> Iterator[Check]:
    """vLLM's host memory is one file for each engine, which only a clean exit deletes: files that nobody has open, of
    those that this user may read, keep memory in vain. They are named, and never deleted here."""
    kept = {path: size for path in sorted(shared.glob(_REGIONS)) if (size := _kept(path)) is not None}
    left, nbytes = list(kept), sum(kept.values())
    facts: Facts = {"files": len(left), "bytes": nbytes}
    if not left:
        yield Check("engine-leftovers", "ok", f"no killed engine has left vLLM's host memory in {shared}", facts=facts)
        return
    text = f"{len(left)} file(s) of killed vLLM engines, which nobody has open, keep {format_size(nbytes)} of memory"
    fix = "rm " + " ".join(shlex.quote(str(path)) for path in left[:_NAMED])
    yield Check("engine-leftovers", "warn", text, fix + (", and ask again" if left[_NAMED:] else ""), facts=facts)


def _kept(path: Path) -> int | None:
    """Bytes of memory that the file keeps; None where a process may have it open or mapped for writing, of whatever
    container: the kernel grants a lease for reading only where none has."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return os.fstat(file).st_blocks * 512
    except OSError:
        return None
    finally:
        os.close(file)
