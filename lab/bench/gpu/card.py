"""Which GPU it is, how it is attached, and how much energy it has used. What cannot be asked is None."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from typing import Any

ASKED = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "power.limit",
)


def facts() -> dict[str, str]:
    """Of the first GPU that torch sees; on a CPU only that. Ask while it works: an idle link may run slowly."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    found = {"device": "cuda", "name": str(properties.name), "cuda": str(torch.version.cuda)}
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "-i", _uuid() or "0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return found | {"nvidia-smi": "no answer"}
    return found | dict(zip(ASKED, (cell.strip() for cell in answer.splitlines()[0].split(",")), strict=False))


def joules() -> float | None:
    """That the GPU has used since its driver was loaded. None: there is no NVML, or the GPU does not count."""
    library, handle = _nvml()
    used = ctypes.c_ulonglong()
    if library is None or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)):
        return None
    return used.value / 1e3


@functools.cache
def _nvml() -> tuple[Any, Any]:
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None, handle
        uuid = _uuid()
        failed = (
            library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
            if uuid
            else library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        )
    except (OSError, AttributeError):
        return None, handle
    return (None if failed else library), handle


def _uuid() -> str:
    """As the driver's tools write it: numbers of GPUs are others there where some are hidden from us."""
    import torch

    if not torch.cuda.is_available():
        return ""
    found = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return f"GPU-{found}" if found and not found.startswith("GPU-") else found
