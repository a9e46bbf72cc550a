"""Lets vLLM's OffloadingConnector run on the CPU platform, so that it can be measured beside stepwell.

vLLM refuses CPUs for its offloading although only the copy engine needs a GPU. This module replaces the copy by a
batched memcpy (`bcopy.c`, compiled when this is imported; slower without a C compiler) and streams and events by
objects that are always done. Scheduler, manager, eviction policy, look-up and file I/O stay vLLM's own. Written for
vLLM 0.31 and 0.32.

With this folder on PYTHONPATH, as every engine process imports the module by its name:

  CPU tier            kv_connector "OffloadingConnector", kv_role "kv_both", kv_connector_extra_config
                      {"spec_name": "CpuOffloadingSpec", "spec_module_path": "peers_cpu_shim", "cpu_bytes_to_use": N}
  CPU and file tier   the same with "spec_name": "CpuTieringSpec" and
                      "secondary_tiers": [{"type": "fs", "root_dir": FOLDER}]
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering import spec as tiering_spec


def _compiled() -> Callable[..., None]:
    """Raises OSError or CalledProcessError where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:  # the library stays mapped when the file is gone
        built = Path(folder) / "bcopy.so"
        source = Path(__file__).with_name("bcopy.c")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", source, "-o", built], check=True, capture_output=True)
        copy = ctypes.CDLL(str(built)).bcopy_batch
    copy.restype = None
    copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    return copy


_copy: Callable[..., None] | None
try:
    _copy = _compiled()
except (OSError, subprocess.CalledProcessError):  # for tests, which measure nothing
    _copy = None


def _swap_blocks(
    src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """vLLM's batched copy: addresses and sizes as int64 tensors. Has copied everything when it returns."""
    if _copy is None:
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        return
    to, from_, sized = (np.ascontiguousarray(tensor.numpy()).view(np.uint64) for tensor in (dst, src, sizes))
    _copy(to.ctypes.data, from_.ctypes.data, sized.ctypes.data, len(sized))


class Stream:
    """Whatever is given to it has been done already."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to make."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Event:
    """A moment of the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = time.perf_counter()

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        return (later.at - self.at) * 1e3


class Torch(types.ModuleType):
    """`torch` as vLLM's worker for offloading is to see it."""

    Event = Event
    cuda = types.SimpleNamespace(Stream=Stream, current_stream=lambda *args: Stream())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Platform:
    """vLLM's platform, with streams."""

    Stream = Stream

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def current_stream(self) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class OnDevice(torch.Tensor):
    """Passes the check that KV pages lie on a GPU."""

    is_cuda = True


class _OnCpu:
    """Mixed into one of vLLM's specs: builds its worker although the platform is the CPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            gpu_worker.torch = Torch("torch")
            gpu_worker.current_platform = Platform(gpu_worker.current_platform)
            gpu_worker._select_swap_blocks_fn = lambda *args, **kwargs: _swap_blocks
            rank = self.config.parallel.rank
            if hasattr(tiering_spec, "torch"):  # vLLM 0.31 takes the rank from the number of the GPU
                accelerator = types.SimpleNamespace(current_device_index=lambda: rank)
                tiering_spec.torch = types.SimpleNamespace(accelerator=accelerator)
            for cache in kv_caches.tensors:
                cache.tensor = cache.tensor.as_subclass(OnDevice)
            self._worker = self.create_worker(kv_caches)
        return self._worker


class CpuOffloadingSpec(_OnCpu, CPUOffloadingSpec):
    """vLLM's CPU tier."""


class CpuTieringSpec(_OnCpu, tiering_spec.TieringOffloadingSpec):
    """vLLM's CPU tier with secondary tiers behind it."""
