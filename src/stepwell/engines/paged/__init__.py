"""Copying between an engine's paged KV and the arena's slots, on CPU and on CUDA. Knows no engine.

base, pool      what all copies promise; where the pages of each layer lie
runs, compare   which pieces a copy consists of; how far computed pages are from stored ones
cpu, team       copies by NumPy and two threads, done when they return
gpu/            copies on a device: order, fences and bounds; CUDA; copy engine or kernel, as measured
lane            jobs that wait for copies under way, one after the other or side by side
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.engines.paged.base import Copies
from stepwell.errors import Unsupported


def open_copies(kv_caches: Mapping[str, Any], num_pages: int) -> Copies:
    """Copies for these tensors, by the device that they are on: per layer, pages first. On CUDA this measures which way
    of copying is faster, some seconds; pages keep what is in them, but nothing else may use them meanwhile. Raises
    Unsupported SW-703 for another device, SW-707 for pages that are not one run of bytes in each layer, and what
    `CudaDevice` raises."""
    kinds = {tensor.device.type for tensor in kv_caches.values()}
    if kinds == {"cpu"}:
        from stepwell.engines.paged.cpu import open_cpu

        return open_cpu(kv_caches, num_pages)
    if kinds == {"cuda"}:
        from stepwell.engines.paged.gpu.cuda import open_cuda

        return open_cuda(kv_caches, num_pages)
    raise Unsupported(
        "SW-703",
        what=f"KV on {', '.join(sorted(kinds)) or 'no device'} is not supported",
        why="pages are copied on CPU and on CUDA",
        fix="run the engine on one of them, or without stepwell",
    )
