"""What is asked of the CUDA runtime, by one that does it at once on this processor's memory. Its order is another
matter, which only a GPU can tell: `make test-gpu`."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="pages are torch's tensors")

import torch

from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.gpu import cuda as cuda_module
from stepwell.engines.paged.gpu import kernel
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.cuda import CudaDevice
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.pool import pool_of
from stepwell.errors import CapacityError, Unsupported

TO_DEVICE, TO_HOST = 1, 2


class Runtime:
    """Copies by hand. `code`: what each call returns."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[str] = []
        self.kinds: set[int] = set()

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> int:
        assert width <= min(pitch, to_pitch) and stream == 7
        self.kinds.add(kind)
        for row in range(height if not self.code else 0):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, width)
        return self.code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(f"register {nbytes} {flags}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return self.code

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.calls.append(f"mode {mode._obj.value}")
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append("forget")
        return 0

    def cudaGetErrorString(self, code: int) -> bytes:
        return b"out of memory"


class Event:
    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 2.0


class Stream:
    cuda_stream = 7
    device = "cpu"

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self.waited.append("synchronize")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device of this thread's engine, without a GPU."""
    stream = Stream()
    fake = SimpleNamespace(
        Event=lambda **_: Event(),
        set_device=lambda index: None,
        current_stream=lambda index: stream,
        device=lambda index: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    made = CudaDevice.__new__(CudaDevice)
    made._torch, made._index, made._runtime = torch, 0, Runtime()
    made._engine, made._entered = threading.get_ident(), threading.local()
    made._streams = {direction: Stream() for direction in Direction}
    return made


def copies(device: CudaDevice, method: CopyMethod) -> tuple[GpuCopies, list[torch.Tensor]]:
    tensors = [torch.arange(10 * 64, dtype=torch.int16).reshape(10, 64) + 1000 * n for n in range(2)]
    pool = pool_of({str(n): t for n, t in enumerate(tensors)}, 10)
    return GpuCopies(pool, device, dict.fromkeys(Direction, method)), tensors


@pytest.mark.parametrize("method", list(CopyMethod))
def test_each_way_copies_in_its_direction(
    device: CudaDevice, method: CopyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernel is Triton's")
    import triton

    kernel.copy_kernel.cache_clear()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    gpu, tensors = copies(device, method)
    before = torch.stack(tensors)
    slots = np.zeros((2, 3 * gpu.page_bytes), np.uint8)
    shards = [Shard(Slot(slots, 0), 0, [2, 4, 6]), Shard(Slot(slots, 1), 0, [9, 0, 1])]
    gpu.gather(shards, gpu.now()).wait()
    expected = torch.stack(tensors, 1)[[2, 4, 6, 9, 0, 1]].numpy().tobytes()
    assert slots.tobytes() == expected and torch.equal(torch.stack(tensors), before)
    for tensor in tensors:
        tensor.zero_()
    flight = gpu.scatter(shards, gpu.now())
    flight.wait()
    assert slots.tobytes() == expected and flight.seconds == 2e-3
    assert torch.equal(torch.stack(tensors)[:, [0, 1, 2, 4, 6, 9]], before[:, [0, 1, 2, 4, 6, 9]])
    assert not torch.stack(tensors)[:, [3, 5, 7, 8]].any()
    assert device._runtime.kinds == ({TO_DEVICE, TO_HOST} if method is CopyMethod.ENGINE else set())
    kernel.copy_kernel.cache_clear()


def test_what_was_begun_has_ended_when_a_copy_is_refused(device: CudaDevice) -> None:
    gpu, _ = copies(device, CopyMethod.ENGINE)
    device._runtime.code = 2
    slots = np.zeros((1, gpu.page_bytes), np.uint8)
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu.gather([Shard(Slot(slots, 0), 0, [1])], gpu.now())
    assert device._streams[Direction.OUT].waited[-1] == "synchronize" and not gpu._flights
    assert device._runtime.calls[-1] == "forget", "or the engine's next call would find the error"


def test_what_was_begun_has_ended_when_nobody_would_learn_of_its_end(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = copies(device, CopyMethod.ENGINE)
    after, slots, made = gpu.now(), np.zeros((1, gpu.page_bytes), np.uint8), count()

    def record(self: Any, stream: Any) -> None:
        if next(made):  # the event after the copies
            raise RuntimeError("no more events")

    monkeypatch.setattr(Event, "record", record)
    with pytest.raises(RuntimeError, match="no more events"):
        gpu.gather([Shard(Slot(slots, 0), 0, [1])], after)
    assert slots.any() and device._streams[Direction.OUT].waited[-1] == "synchronize"


def test_registration(device: CudaDevice) -> None:
    gpu, _ = copies(device, CopyMethod.ENGINE)
    assert gpu.prepare is not None
    undo = gpu.prepare(np.zeros(4096, np.uint8))
    undo()
    assert device._runtime.calls == ["register 4096 1", "unregister"]
    device._runtime.code = 2
    with pytest.raises(CapacityError, match="out of memory") as refused:
        gpu.prepare(np.zeros(4096, np.uint8))
    assert refused.value.code == "SW-208" and device._runtime.calls[-1] == "forget"


def test_only_threads_of_our_own_call_while_a_graph_is_captured(device: CudaDevice) -> None:
    device.enter()
    assert device._runtime.calls == [], "the engine's thread stays as it is"

    def ours() -> None:
        device.enter()
        device.enter()

    thread = threading.Thread(target=ours)
    thread.start()
    thread.join(10)
    assert device._runtime.calls == ["mode 2"], "once, relaxed"


def test_a_process_without_a_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_module._runtime.cache_clear()
    with pytest.raises(Unsupported, match="libcudart") as refused:
        cuda_module._runtime("13")
    assert refused.value.code == "SW-714"


def test_a_failed_device_has_passed_everything(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs there any more; who waits is told."""

    def fails(self: Any) -> bool:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Event, "query", fails)
    monkeypatch.setattr(Event, "synchronize", fails)
    point = device.now()
    assert point.passed
    with pytest.raises(RuntimeError, match="illegal"):
        point.wait()
