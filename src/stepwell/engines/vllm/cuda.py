"""What must hold for vLLM's pages on CUDA to be copied, and what of the GPU belongs to their layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from stepwell.errors import StepwellError, Unsupported

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)", re.IGNORECASE)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def unusable(kv_cache_config: Any, env: Mapping[str, str] = os.environ) -> StepwellError | None:
    """The first thing that keeps pages on this GPU from being copied correctly, or None. Asks torch how it was built,
    not the GPU: the scheduler's process has none."""
    import torch

    if torch.version.cuda is None:
        return Unsupported(
            "SW-714",
            what="this GPU cannot be used",
            why="torch is not built for CUDA" + (", but for ROCm" if torch.version.hip else ""),
            fix="run the engine on CUDA or on CPU, or without stepwell",
        )
    for name in _ALLOCATOR:
        if _EXPANDABLE.search(env.get(name, "")):
            return Unsupported(
                "SW-714",
                what=f"{name} with expandable_segments is not supported",
                why="the allocator then maps the engine's pages piece by piece, and they cannot be relied on to stay",
                fix=f"remove expandable_segments from {name} for this engine",
            )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        return Unsupported(
            "SW-712",
            what="KV of several precisions, or of Mamba layers, is not supported on CUDA",
            why="the engine zeroes pages that it takes before it tells which: copies out of them cannot be waited for",
            fix="use one KV dtype for all layers, or run without stepwell",
        )
    return None


def facts() -> dict[str, str]:
    """What decides, beside the settings, how an attention backend lays out its pages. Raises ImportError or
    AttributeError where vLLM does not say."""
    from vllm.platforms import current_platform

    return {"gpu": str(current_platform.get_device_capability())}
