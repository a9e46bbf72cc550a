"""The CUDA driver of this machine: what it reports and can do, asked in a process of its own.

A driver may hang where no signal reaches, or end the process that loads it. So `python -m stepwell.ops.checks.driver`
asks it step by step, with ctypes alone, and prints the results so far before each step. `look` reads the last of them,
and leaves the process behind if it cannot be killed. Only the doctor calls this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from stepwell.errors import StepwellError
from stepwell.io.process.parent import end_with_parent
from stepwell.ops.checks.memory import SLAB_BYTES, populated

LIBRARY = "libcuda.so.1"
PATIENCE_SECONDS = 30.0
"""Time limit: on idle GPUs some drivers take seconds a GPU to start."""

NONE_THERE = frozenset({"CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"})
IN_USE = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE"})

_DEATH_SECONDS = 1.0
_UNIFIED_ADDRESSING = 41  # CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: as the adapter registers
_NAME_BYTES = 256

Step = Literal["load", "start", "slab", "context", "register", "unregister", "done"]
Failure = Literal["absent", "refused", "lost"]


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `unified`: host memory and the GPU's own have no address in common."""

    name: str
    nbytes: int
    unified: bool


class DriverFindings(msgspec.Struct, frozen=True):
    """Findings up to the last `step`. `failure`: how that step failed, None only for "done": there is no such library,
    it was refused, or the process that asked hung or died in it. `error`: the driver's name for the reason, if any.
    `cuda`: the newest version that the driver can serve, such as "12.4". `gpus`: those that this process may see, in
    the driver's order; the first one registers a slab."""

    step: Step = "load"
    failure: Failure | None = None
    error: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    seconds_per_gib: float = 0.0


def look(library: str = LIBRARY, patience: float = PATIENCE_SECONDS) -> DriverFindings:
    """Asks `library` for at most `patience` seconds, and a second more. Raises OSError if no process can be started."""
    package = str(Path(__file__).resolve().parents[2])  # the very package that runs here
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile() as out:  # not a pipe, which a process that cannot die would hold open
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "stepwell.ops.checks.driver", library],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path},
        )
        end = how_it_ended(child, patience)
        out.seek(0)
        lines = [each for each in out.read().splitlines(keepends=True) if each.endswith(b"\n")]
    seen = msgspec.json.decode(lines[-1], type=DriverFindings) if lines else DriverFindings()
    return seen if seen.step == "done" or seen.failure else msgspec.structs.replace(seen, failure="lost", error=end)


def how_it_ended(child: subprocess.Popen[bytes], patience: float) -> str:
    """Waits for it for so many seconds and kills it then, without waiting long for its death."""
    try:
        status = child.wait(patience)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_DEATH_SECONDS)
        return f"it did not answer within {patience:g} s"
    return f"the process that asked was ended by signal {-status}" if status < 0 else f"it ended with status {status}"


def ask(library: str) -> Iterator[DriverFindings]:
    """Yields the findings before each step, and at the end. The first GPU registers a slab as a well makes it, and
    unregisters it."""
    seen = DriverFindings()
    yield seen
    try:
        driver = _Driver(library)
    except OSError as error:
        yield msgspec.structs.replace(seen, failure="absent", error=str(error))
        return
    try:
        yield (seen := msgspec.structs.replace(seen, step="start"))
        driver.call("cuInit", 0)
        version, count = ctypes.c_int(), ctypes.c_int()
        driver.call("cuDriverGetVersion", ctypes.byref(version))
        driver.call("cuDeviceGetCount", ctypes.byref(count))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        gpus = tuple(driver.gpu(index) for index in range(count.value))
        yield (seen := msgspec.structs.replace(seen, cuda=cuda, gpus=gpus))
        if not gpus:
            raise _Refused("CUDA_ERROR_NO_DEVICE")

        yield (seen := msgspec.structs.replace(seen, step="slab"))
        with populated() as (slab, _):
            yield (seen := msgspec.structs.replace(seen, step="context"))
            first, context = ctypes.c_int(), ctypes.c_void_p()
            driver.call("cuDeviceGet", ctypes.byref(first), 0)
            driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), first)
            driver.call("cuCtxSetCurrent", context)

            yield (seen := msgspec.structs.replace(seen, step="register"))
            memory = ctypes.c_void_p(slab.bytes.ctypes.data)
            before = time.perf_counter()
            driver.call("cuMemHostRegister_v2", memory, ctypes.c_size_t(SLAB_BYTES), ctypes.c_uint(_PORTABLE))
            seconds = (time.perf_counter() - before) * (1 << 30) / SLAB_BYTES

            yield (seen := msgspec.structs.replace(seen, step="unregister", seconds_per_gib=seconds))
            driver.call("cuMemHostUnregister", memory)
        yield msgspec.structs.replace(seen, step="done")
    except StepwellError as error:
        yield msgspec.structs.replace(seen, failure="refused", error=f"{error.what}: {error.why}")
    except (_Refused, OSError) as error:
        yield msgspec.structs.replace(seen, failure="refused", error=str(error))


class _Refused(Exception):
    """The driver's name for why not."""


class _Driver:
    """Raises OSError where there is no such library."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: object) -> None:
        """Numbers go as C's int, all else as it is. Raises _Refused."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise _Refused(f"the driver has no {name}: it is too old") from None
        if code := function(*arguments):
            raise _Refused(self._name(code))

    def gpu(self, index: int) -> Gpu:
        handle, total, unified = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(handle), index)
        self.call("cuDeviceGetName", name, _NAME_BYTES, handle)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), handle)
        self.call("cuDeviceGetAttribute", ctypes.byref(unified), _UNIFIED_ADDRESSING, handle)
        return Gpu(name.value.decode(errors="replace"), total.value, bool(unified.value))

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(name)) or name.value is None:
            return f"error {code}"
        return name.value.decode(errors="replace")


def main() -> None:
    end_with_parent()
    for seen in ask(sys.argv[1]):
        sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
