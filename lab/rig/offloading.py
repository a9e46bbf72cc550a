"""vLLM's own KV offloading on a CPU: its scheduler, managers and tiers, with a copy in memory for the GPU's.

vLLM refuses to offload on a CPU, though only the copy between pages and rows needs a device. Here that copy is made at
once, by memmove, on streams and events that are always done; on a GPU copies run beside the model, so times of a run
with this are good for comparing tiers with each other and for nothing else. Every process of the engine imports this
module by the name that the configuration gives:

    "spec_name": "TieringOnCpu", "spec_module_path": "lab.rig.offloading"
"""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        self._at = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: _Event) -> float:
        return (later._at - self._at) * 1e3


class _Torch(ModuleType):
    """`torch` as the copying code sees it: its events are always done."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Platform:
    """vLLM's platform, whose streams have nothing to wait for."""

    Stream = _Stream

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def current_stream(self) -> _Stream:
        return _Stream()

    def stream(self, stream: object) -> nullcontext[None]:
        return nullcontext()


class _OnDevice(torch.Tensor):  # type: ignore[misc]
    """Pages that pass for those of a GPU."""

    is_cuda = True


def _copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **how: object) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class TieringOnCpu(TieringOffloadingSpec):  # type: ignore[misc]
    def create_worker(self, kv_caches: Any) -> Any:
        if not isinstance(gpu_worker.current_platform, _Platform):
            vars(gpu_worker).update(
                torch=_Torch("torch"),
                current_platform=_Platform(gpu_worker.current_platform),
                _select_swap_blocks_fn=lambda *args, **kwargs: _copy,
            )
        for cache in kv_caches.tensors:
            cache.tensor = cache.tensor.as_subclass(_OnDevice)
        return super().create_worker(kv_caches)

    def get_worker(self, kv_caches: Any) -> Any:
        self._worker: Any = self._worker or self.create_worker(kv_caches)
        return self._worker
