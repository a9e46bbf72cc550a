"""Adapters in vLLM: when it loads one, and which of its settings change what they compute."""

from __future__ import annotations

import functools
from typing import Any

from stepwell.engines.common.adapters import loading
from stepwell.engines.vllm.identity.values import canonical

# Of vLLM's LoRAConfig, what changes no adapter's output: how many there may be, and how kernels are compiled.
_VOLATILE = frozenset({"max_loras", "max_cpu_loras", "default_mm_loras", "specialize_active_lora"})


def watch_loads() -> None:
    """Makes all `Adapters` of this process learn of an adapter that is registered with vLLM before vLLM loads it. No
    hook of a connector tells that. Raises ImportError or AttributeError where vLLM does that elsewhere."""
    from vllm.v1.engine.core import EngineCore

    plain = EngineCore.add_lora
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def add_lora(core: Any, lora_request: Any) -> Any:
        loading(lora_request)
        return plain(core, lora_request)

    EngineCore.add_lora = add_lora


def lora_facts(lora_config: Any) -> dict[str, str]:
    """Those of vLLM's LoRA settings that may change an adapter's KV. Raises Unsupported SW-712 as `canonical` does."""
    names = [name for name in vars(lora_config) if not name.startswith("_") and name not in _VOLATILE]
    return {f"lora.{name}": canonical(getattr(lora_config, name)) for name in names}
