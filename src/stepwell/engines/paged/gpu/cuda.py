"""A CUDA device for `gpu.GpuCopies`: streams, events, the copy engines, the kernel, and registration of host memory.

torch gives streams, events and tensors. What it has no call for (2-D copies, the capture mode of a thread) is asked of
the CUDA runtime that torch has loaded. Host memory is registered in place (cudaHostRegister). With unified addressing,
which is required, copy engines know it by its own address; a kernel does on most GPUs, and is not used on others.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.engines.paged.base import Mark
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, DeviceEvent, Direction
from stepwell.engines.paged.pool import Pool, pool_of
from stepwell.engines.paged.runs import Places, pieces, runs
from stepwell.errors import CapacityError, Unsupported
from stepwell.io.memory import Bytes

VERIFIED_ON = ""
"""The GPU on which `make test-gpu` has passed with this code; empty: none yet."""

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class CudaEvent:
    """Recorded on a stream when it is made."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        import torch

        # Blocking: a thread that waits sleeps, where another one would keep a processor busy.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)
        self._device = device

    @property
    def passed(self) -> bool:
        self._device.enter()
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True

    def wait(self) -> None:
        self._device.enter()
        self.event.synchronize()

    def seconds_after(self, earlier: Mark) -> float | None:
        assert isinstance(earlier, CudaEvent)
        if not self.passed:
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaDevice:
    """One GPU, of an engine whose work goes to the current stream of the thread that makes this and calls `now` and
    `hold_back`.
    Raises Unsupported SW-714 for a GPU without unified addressing or a torch whose CUDA runtime cannot be found."""

    def __init__(self, index: int) -> None:
        import torch

        self._torch = torch
        self._index = index
        self._runtime = _runtime(str(torch.version.cuda).split(".")[0])
        self._engine = threading.get_ident()
        self._entered = threading.local()
        self.enter()
        if not _attribute(self._runtime, _UNIFIED_ADDRESSING, index):
            raise _unusable("the GPU has no unified addressing", "use stepwell with another GPU")
        self.kernel_reaches = bool(_attribute(self._runtime, _HOST_POINTER_OF_REGISTERED, index))
        self._streams = {direction: torch.cuda.Stream(index) for direction in Direction}

    def enter(self) -> None:
        """Once for each thread: chooses the GPU, and lets threads of our own call while the engine's captures a CUDA
        graph. By default their calls would be refused, and end the capture."""
        if getattr(self._entered, "done", False):
            return
        self._torch.cuda.set_device(self._index)
        if threading.get_ident() != self._engine:
            mode = ctypes.c_int(_RELAXED)
            self._check(self._runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        self._entered.done = True

    def now(self) -> CudaEvent:
        return CudaEvent(self, self._torch.cuda.current_stream(self._index))

    def hold_back(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self._torch.cuda.current_stream(self._index).wait_event(event.event)

    def enqueue(
        self, direction: Direction, method: CopyMethod, where: Places, pool: Pool, after: Sequence[Mark | DeviceEvent]
    ) -> tuple[CudaEvent, CudaEvent]:
        self.enter()
        stream = self._streams[direction]
        for event in after:
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.event)
        began = CudaEvent(self, stream)
        try:
            if method is CopyMethod.KERNEL:
                self._by_kernel(stream, direction, where, pool)
            else:
                self._by_engine(stream, direction, where, pool)
            return began, CudaEvent(self, stream)
        except BaseException:
            stream.synchronize()  # what was begun before it was refused
            raise

    def _by_engine(self, stream: Any, direction: Direction, where: Places, pool: Pool) -> None:
        copy, handle = self._runtime.cudaMemcpy2DAsync, stream.cuda_stream
        for run in runs(where, pool):
            host, device = (run.host, run.host_pitch), (run.device, run.device_pitch)
            source, target, kind = (
                (device, host, _TO_HOST) if direction is Direction.OUT else (host, device, _TO_DEVICE)
            )
            self._check(copy(*target, *source, run.width, run.height, kind, handle))

    def _by_kernel(self, stream: Any, direction: Direction, where: Places, pool: Pool) -> None:
        from stepwell.engines.paged.gpu.kernel import launch

        torch = self._torch
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            # torch keeps the pinned original until the copy of it has ended, and the copy until the kernel has.
            table = torch.from_numpy(pieces(where, pool)).pin_memory().to(stream.device, non_blocking=True)
            host, device, sizes = table
            source, target = (device, host) if direction is Direction.OUT else (host, device)
            launch(source, target, sizes, max(span.nbytes for span in pool.spans))

    def seconds(self, began: DeviceEvent, ended: DeviceEvent) -> float:
        assert isinstance(began, CudaEvent) and isinstance(ended, CudaEvent)
        return ended.seconds_after(began) or 0.0

    def memory(self, nbytes: int) -> Bytes:
        memory: Bytes = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def register(self, memory: Bytes) -> None:
        self.enter()
        code = self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        if code:
            self._runtime.cudaGetLastError()  # or the engine's next call would find it
            raise CapacityError(
                "SW-208",
                what=f"the CUDA driver refused to register {memory.nbytes} bytes of host memory",
                why=f"{self._name(code)}: too little memory that can be locked, or a limit on it (ulimit -l)",
                fix="raise the limit (docker: --ulimit memlock=-1), or lower `host`; `stepwell doctor` tells more",
            )

    def unregister(self, memory: Bytes) -> None:
        self.enter()
        self._check(self._runtime.cudaHostUnregister(memory.ctypes.data))

    def close(self) -> None:
        pass

    def _check(self, code: int) -> None:
        if code:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"CUDA: {self._name(code)}")

    def _name(self, code: int) -> str:
        return str((self._runtime.cudaGetErrorString(code) or b"").decode(errors="replace")) or f"error {code}"


_UNIFIED_ADDRESSING = 41  # cudaDevAttrUnifiedAddressing
_HOST_POINTER_OF_REGISTERED = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


def _attribute(runtime: ctypes.CDLL, attribute: int, index: int) -> int:
    value = ctypes.c_int()
    if runtime.cudaDeviceGetAttribute(ctypes.byref(value), attribute, index):
        runtime.cudaGetLastError()
        return 0
    return value.value


@functools.cache
def _runtime(major: str) -> ctypes.CDLL:
    """The CUDA runtime that torch, built for this major version, has loaded: another one would have other streams and
    errors. Raises Unsupported SW-714."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcudart" in line}
    paths = [path for path in loaded if f"libcudart.so.{major}" in path] or list(loaded)
    if not paths:
        raise _unusable("torch has loaded no CUDA runtime library (libcudart)", "use a torch that is built for CUDA")
    library = ctypes.CDLL(sorted(paths)[0])
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    library.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
    library.cudaHostUnregister.argtypes = [pointer]
    library.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, number, pointer]
    library.cudaThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(number)]
    library.cudaDeviceGetAttribute.argtypes = [ctypes.POINTER(number), number, number]
    library.cudaGetErrorString.argtypes = [number]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _unusable(why: str, fix: str) -> Unsupported:
    return Unsupported("SW-714", what="this GPU cannot be used", why=why, fix=fix)


def open_cuda(kv_caches: Mapping[str, Any], num_pages: int) -> GpuCopies:
    """Copies for these tensors, in the way that is faster here for each direction. Raises Unsupported SW-707 as
    `pool_of` does, SW-714 as `CudaDevice`, and SW-703 for KV on several GPUs."""
    from stepwell.engines.paged.gpu.method import measure

    devices = {tensor.device.index for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise Unsupported(
            "SW-703",
            what="KV of one rank on several GPUs is not supported",
            why=f"its layers are on GPUs {sorted(devices)}",
            fix="give each rank a GPU of its own",
        )
    pool = pool_of(kv_caches, num_pages)
    device = CudaDevice(devices.pop())
    return GpuCopies(pool, device, measure(pool, device))
