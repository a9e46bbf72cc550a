"""Checks for engines and models that stepwell cannot serve correctly yet."""

from __future__ import annotations

import os
import platform
import re
from typing import TYPE_CHECKING

from stepwell.block.groups import GroupKind
from stepwell.engines.vllm.identity.drafts import unsupported_drafts
from stepwell.engines.vllm.identity.groups import KINDS, group_rules, layer_specs
from stepwell.engines.vllm.identity.values import no_option, refusal
from stepwell.errors import StepwellError, Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)", re.IGNORECASE)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> StepwellError | None:
    """The first thing about this engine that the connector cannot serve correctly yet, or None.

    Returns the error rather than raising it: the caller decides between an inert connector and refusing to start.
    A vLLM without these interfaces raises ImportError or AttributeError.
    """
    return (
        _unsupported_setup(vllm_config) or unrepeatable(vllm_config) or _unsupported_pages(vllm_config, kv_cache_config)
    )


def _unsupported_setup(vllm_config: VllmConfig) -> StepwellError | None:
    """The first refusal by device, processes or features around the model, or None."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        return refusal("SW-703", f"device {device!r}", "its pages are not copied yet", "run vLLM on CUDA or on CPU")
    if device == "cuda" and (unusable := _unusable_gpu()) is not None:
        return unusable
    if transfer is None or transfer.kv_role != "kv_both":
        role = None if transfer is None else transfer.kv_role
        return refusal("SW-706", f"kv_role {role!r}", "stepwell both spills and recalls", 'set "kv_role": "kv_both"')
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        where = f"nnodes={parallel.nnodes}, executor {parallel.distributed_executor_backend!r}"
        return refusal("SW-705", where, "all ranks of an engine share one host's memory", "run the engine on one host")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            return no_option(f"{name}={size}", "a page then holds every n-th token only", f"leave {name} at 1")
    if (drafts := unsupported_drafts(vllm_config)) is not None:
        return drafts
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        why = "it wants something of every token of a prompt, and nothing but KV is known of those that are recalled"
        return no_option("enable_return_routed_experts", why, "leave it off, or run that engine without stepwell")
    return None


def unrepeatable(vllm_config: VllmConfig) -> StepwellError | None:
    """The first reason why KV is not decided by the tokens before it, or not computed from a prefix that all ranks know
    of, or None. It holds for every way of copying pages."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        why = "every rank schedules by itself and a recall would make them disagree"
        return no_option("executor 'external_launcher'", why, "use the mp executor")
    if model.is_encoder_decoder:
        why = "its KV depends on more than the tokens before"
        return no_option("an encoder-decoder model", why, "use a decoder-only model")
    if getattr(vllm_config, "diffusion_config", None) is not None or getattr(model, "is_diffusion", False):
        return no_option("a diffusion model", "its KV depends on tokens that come later", "use an autoregressive model")
    if (whole := _computed_whole(vllm_config)) is not None:
        return whole
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "scales found at run time differ from start to start"
        return no_option("calculate_kv_scales", why, "use scales from the checkpoint")
    return None


def _unsupported_pages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> StepwellError | None:
    """The first refusal by the layout of the KV cache, or None."""
    from vllm.v1 import kv_cache_interface

    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return no_option("a model without KV groups", "there is no KV to keep", "remove the connector")
    kinds = {getattr(kv_cache_interface, name, None): kind for name, kind in KINDS.items()}
    alone = "" if len(groups) > 1 else " as its only group"
    for name, spec in (named for group in groups for named in layer_specs(group)):
        kind = kinds.get(type(spec))
        if kind is None or (alone and kind is not GroupKind.FULL):
            why = "what its pages keep of a prefix is not stored yet"
            return no_option(f"{type(spec).__name__} of layer {name}{alone}", why, "run that engine without stepwell")
        if getattr(spec, "non_causal", False):
            why = "its KV depends on tokens that come later"
            return no_option(f"non-causal attention of layer {name}", why, "use a causal model")
    if (uneven := _unsupported_groups(vllm_config, kv_cache_config)) is not None:
        return uneven
    layout = str(kv_cache_config.kv_cache_layout)
    if sorted(layout) != sorted("LBHNC") or {*layout[:2]} != {"L", "B"}:
        why = "it has no page that is one run of bytes in each layer"
        return refusal("SW-707", f"KV layout {layout!r}", why, "set VLLM_KV_CACHE_LAYOUT=LBHNC, or unset it")
    return None


def _unsupported_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> StepwellError | None:
    """The first refusal that only several cache groups together are a reason for, or None."""
    rules = group_rules(kv_cache_config)
    if len(rules) == 1:
        return None
    what = f"a model with {len(rules)} KV groups"
    if all(rule.kind is not GroupKind.FULL for rule in rules):
        why = "none of them keeps every token, by which prefixes are found"
        return refusal("SW-704", what, why, "run that engine without stepwell")
    pages = [rule.page for rule in rules]
    if any(max(pages) % page for page in pages):
        why = f"their pages have {', '.join(map(str, sorted(set(pages))))} tokens, and not all fit into the largest"
        return refusal("SW-704", what, why, "set another block_size")
    if odd := [rule for rule in rules if rule.kind is GroupKind.CHUNK and rule.span % rule.page]:
        why = f"chunks of {odd[0].span} tokens do not end with a page of {odd[0].page}"
        return refusal("SW-704", what, why, "set another block_size")
    if GroupKind.STATE in {rule.kind for rule in rules} and (why := _odd_states(vllm_config, kv_cache_config)):
        return refusal("SW-704", f"{what}, some with states", why, "run that engine without stepwell")
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    if not hasattr(base, "KVConnectorTransferResults"):
        why = "this vLLM cannot be told which of its requests a recall failed for"
        return refusal("SW-704", what, why, "use vLLM 0.32 or newer")
    return None


def _odd_states(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why it is not known of a page which prefix its state belongs to; "" where it is."""
    if (mode := vllm_config.cache_config.mamba_cache_mode) != "align":
        return f"in mamba_cache_mode {mode!r} they are not kept at the ends of blocks alone"
    if vllm_config.speculative_config is not None:
        return "with speculative decoding a state may be behind tokens that are rejected"
    if len({kv_cache_config.hash_block_size, *(rule.page for rule in group_rules(kv_cache_config))}) > 1:
        return "the engine keeps them at places within a block too"
    return ""


def _computed_whole(vllm_config: VllmConfig) -> StepwellError | None:
    """The first reason why vLLM has no prefix caching for this engine, whatever its user sets, or None. Where only the
    rest of a prompt is computed, answers are wrong or the engine ends; a connector is asked for the prefix all the
    same."""
    import vllm.envs

    model, named = vllm_config.model_config, vllm_config.attention_config.backend
    device, cached = vllm_config.device_config.device_type, vllm_config.cache_config.enable_prefix_caching
    why = "vLLM computes each of its prompts whole, so there is nothing to recall"
    if not model.is_prefix_caching_supported:
        pooler = model.pooler_config if model.attn_type == "decoder" else None
        named_kinds = () if pooler is None else (pooler.seq_pooling_type, pooler.tok_pooling_type)
        if kinds := [kind for kind in named_kinds if kind in ("MEAN", "CLS", "STEP")]:
            return no_option(f"pooling by {' and '.join(kinds)}", why, "pool by LAST or ALL, or remove the connector")
        return no_option("a model without prefix caching", why, "remove the connector")
    if device == "cpu" and not cached:
        if platform.machine().startswith("riscv"):
            return no_option("RISC-V without prefix caching", why, "remove the connector")
        if model.use_mla and not _goes_on_behind_mla():
            return no_option("MLA without prefix caching", why, "remove the connector")
    backend = named.name if named is not None else "TRITON_MLA" if model.use_mla else ""
    if device == "cuda" and vllm.envs.VLLM_BATCH_INVARIANT and backend in ("FLASHINFER", "TRITON_MLA"):
        return no_option(f"VLLM_BATCH_INVARIANT with {backend}", why, "name another attention backend, as FLASH_ATTN")
    return None


def _goes_on_behind_mla() -> bool:
    """On CPUs without AMX vLLM keeps no prefix of MLA itself; where it has this function it can go on behind one."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return False
    return hasattr(_custom_ops, "gather_mla_context_cache_cpu")


def _unusable_gpu() -> StepwellError | None:
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
        if _EXPANDABLE.search(os.environ.get(name, "")):
            return Unsupported(
                "SW-714",
                what=f"{name} with expandable_segments is not supported",
                why="the allocator then maps the engine's pages piece by piece, and they cannot be relied on to stay",
                fix=f"remove expandable_segments from {name} for this engine",
            )
    return None
