"""Checks of GPUs: can an engine beside us use them, and can the connector register host memory with their driver?

On a machine without a GPU, and without an engine or torch that wants one, that is one line.
"""

from __future__ import annotations

import ast
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stepwell.errors import CapacityError, Unsupported
from stepwell.io.mounts import SYSTEM
from stepwell.ops.checks import places
from stepwell.ops.checks.check import Check, Facts, Status, failed
from stepwell.ops.checks.driver import IN_USE, LIBRARY, NONE_THERE, DriverFindings, look
from stepwell.ops.checks.memory import SLAB_BYTES
from stepwell.units import format_size

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*(true|1)\s*", re.IGNORECASE)  # as the adapter reads it
_VERSION = "sys/module/nvidia/version"
_LOOK = "see `nvidia-smi` and the kernel's log (dmesg, NVRM and Xid); engines cannot use the GPU either"


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch of this environment. `cuda` is the version that it is built for; "" for none, None if unknown."""

    version: str
    cuda: str | None


@dataclass(frozen=True, slots=True)
class Software:
    """Installed software that concerns GPUs."""

    engine: str = ""
    torch: Torch | None = None

    @property
    def for_gpu(self) -> str:
        """Software here that is built for CUDA; empty if there is none."""
        parts = [self.engine] if self.engine else []
        if self.torch is not None and self.torch.cuda:
            parts.append(f"torch {self.torch.version}")
        return " and ".join(parts)


def software() -> Software:
    """Installed software, read from package metadata as text: nothing of it is imported."""
    version = places.installed().get(places.GPU_ENGINE)
    return Software(f"{places.GPU_ENGINE} {version}" if version else "", _torch())


def all_of(env: Mapping[str, str], has: Software, library: str = LIBRARY) -> Iterator[Check]:
    """All checks; `env` is the environment that an engine would have. Raises OSError if no process can be started."""
    seen = look(library)
    yield visible(seen, has)
    if seen.gpus:
        yield registration(seen)
    yield from allocator(env, expected=bool(seen.gpus or has.for_gpu))
    if seen.gpus:
        from stepwell.engines.paged.gpu.cuda import VERIFIED_ON

        yield copies(VERIFIED_ON)


def visible(seen: DriverFindings, has: Software, system: Path = SYSTEM) -> Check:
    """Checks that there is a GPU if software is built for one, and software if there is a GPU."""
    name = "gpu"
    if not seen.gpus:
        return _invisible(seen, has)
    driver = _driver_version(system)
    facts: Facts = {
        "gpus": len(seen.gpus),
        "names": ", ".join(gpu.name for gpu in seen.gpus),
        "memory_bytes": sum(gpu.nbytes for gpu in seen.gpus),
        "driver": driver,
        "cuda": seen.cuda,
    }
    each = ", ".join(f"{gpu.name} ({format_size(gpu.nbytes)})" for gpu in seen.gpus)
    text = f"{each}; driver{f' {driver}' if driver else ''} for CUDA up to {seen.cuda}"
    torch = has.torch
    if torch is not None and torch.cuda == "":
        fix = "engines on GPUs need a torch that is built for CUDA; this one runs them on CPU"
        return Check(name, "warn", f"{text}; but torch {torch.version} here is not built for CUDA", fix, facts=facts)
    if torch is not None and torch.cuda and _major(torch.cuda) > _major(seen.cuda):
        fix = f"install a newer driver, or a torch that is built for CUDA {_major(seen.cuda)}"
        text = f"{text}; but torch {torch.version} here is built for CUDA {torch.cuda}"
        return Check(name, "warn", text, fix, facts=facts)
    return Check(name, "ok", text, facts=facts)


def _invisible(seen: DriverFindings, has: Software) -> Check:
    absent = seen.failure == "absent"
    if not absent and seen.error not in NONE_THERE:
        status: Status = "fail" if has.for_gpu else "warn"
        return Check("gpu", status, f"the CUDA driver does not work: {seen.error}", _LOOK)
    text = f"no CUDA driver ({seen.error})" if absent else "the CUDA driver sees no GPU"
    if not has.for_gpu:
        return Check("gpu", "ok", f"{text}: engines run on CPU here")
    fix = (
        "let this container or service have the GPU (`docker run --gpus all`, CUDA_VISIBLE_DEVICES), install NVIDIA's "
    )
    fix += "driver, or use builds for CPU"
    return Check("gpu", "warn", f"{text}, but {has.for_gpu} here is built for one", fix)


def registration(seen: DriverFindings) -> Check:
    """The driver lets the first GPU reach a slab where it lies."""
    name = "gpu-registration"
    if lacking := [gpu.name for gpu in seen.gpus if not gpu.unified]:
        error = Unsupported(
            "SW-714",
            what="this GPU cannot be used",
            why=f"{', '.join(lacking)} has no unified addressing",
            fix="use stepwell with another GPU; on this one the engine runs without it",
        )
        return failed(name, error)
    if seen.step == "register" and seen.failure == "refused":
        refused = CapacityError(
            "SW-208",
            what=f"the CUDA driver refused to register {SLAB_BYTES} bytes of host memory",
            why=f"{seen.error}; {_locked()}",
            fix="LimitMEMLOCK=infinity of the unit, `docker run --ulimit memlock=-1`; or lower `host`",
        )
        return failed(name, refused)
    if seen.step == "context" and seen.error in IN_USE:
        text = f"not tried: the GPU is in use by a process that admits no other ({seen.error})"
        return Check(name, "warn", text, "run the doctor again while no engine is on it")
    if seen.failure:
        return Check(name, "fail", f"it could not be tried ({seen.step}): {seen.error}", _LOOK)
    facts = {"register_seconds_per_gib": round(seen.seconds_per_gib, 4), "locked_bytes": _limit()}
    text = f"a slab can be registered; a GiB takes {seen.seconds_per_gib:.2g} s; {_locked()}"
    return Check(name, "ok", text, facts=facts)


def allocator(env: Mapping[str, str], *, expected: bool) -> Iterator[Check]:
    """Checks that torch does not map KV piece by piece. Silent about an allocator that is not configured if none is
    `expected`."""
    name = "gpu-allocator"
    told = [variable for variable in _ALLOCATOR if _expandable(env.get(variable, ""))]
    if told:
        text = f"{' and '.join(told)} has expandable_segments:True: KV pages are mapped piece by piece; stepwell is "
        text += "inert in such an engine (SW-714), and vLLM may refuse a connector"
        yield Check(name, "warn", text, "remove it from the engine's environment")
    elif expected:
        yield Check(name, "ok", f"neither of {' and '.join(_ALLOCATOR)} has expandable_segments here")


def copies(verified_on: str) -> Check:
    """Checks that our own copies have been verified on a GPU."""
    if verified_on:
        return Check("gpu-copies", "ok", f"copies on CUDA are verified on {verified_on}")
    fix = "`make test-gpu` in a clone proves them on this one"
    return Check("gpu-copies", "warn", "copies on CUDA are unverified on GPU", fix)


def _torch() -> Torch | None:
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    try:
        tree = ast.parse(Path(str(found.locate_file("torch/version.py"))).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return Torch(found.version, None)
    values = {
        target.id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }
    return Torch(found.version, str(values["cuda"] or "") if "cuda" in values else None)


def _expandable(configuration: str) -> bool:
    return any(_EXPANDABLE.fullmatch(each) for each in configuration.split(","))


def _driver_version(system: Path) -> str:
    try:
        return (system / _VERSION).read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _major(version: str) -> int:
    digits = version.split(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]


def _locked() -> str:
    limit = _limit()
    return f"the limit on locked memory is {'off' if limit == resource.RLIM_INFINITY else format_size(limit)}"
