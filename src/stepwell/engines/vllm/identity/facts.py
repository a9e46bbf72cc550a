"""Facts that make KV of one vLLM engine interchangeable with another's: model and layout, as text.

Everything is a fact unless listed here as volatile: a field that a new vLLM adds separates namespaces (a miss) rather
than being overlooked (wrong KV). Weights are fingerprinted elsewhere; tenant, epoch, block_tokens and the recipe's
version are added by the caller. Called once per engine, by the connector's scheduler half: the worker halves see other
KV group objects, and their digests would differ.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepwell.block.facts import facts_text, withheld
from stepwell.block.groups import GroupKind, most_needed
from stepwell.engines.common.plan import Shape
from stepwell.engines.vllm.identity.drafts import drafter
from stepwell.engines.vllm.identity.groups import layer_specs
from stepwell.engines.vllm.identity.page_sizes import layer_pages
from stepwell.engines.vllm.identity.values import canonical
from stepwell.protocol.messages import MAX_GROUPS, CacheGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Where a config came from and who wrote it, at any depth of the model's config.
_VOLATILE_CONFIG = frozenset(
    {"_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation", "_attn_implementation_internal"}
)
# ModelConfig fields that do not change the KV of given token ids: names, places, the tokenizer (we see ids), sampling,
# logging, memory, speed; hf_*, which model.config covers; multimodal_config and max_model_len have their own rules.
_VOLATILE_MODEL = _words(
    """
    model model_weights served_model_name tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
    hf_config hf_text_config hf_config_path hf_overrides hf_token config_format revision trust_remote_code
    seed max_model_len spec_target_max_model_len original_max_model_len
    allowed_local_media_path allowed_media_domains generation_config override_generation_config
    max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay logits_processors
    io_processor_plugin renderer_num_workers pooler_config multimodal_config runner convert is_submodel_config
    allow_deprecated_quantization enforce_eager disable_cascade_attn enable_prompt_embeds
    enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
    enable_nccl_comm_suspend enable_cumem_allocator word_embeddings_untied_by_checkpoint
    """
)
# The rest of MultiModalConfig decides what a picture turns into, or under which identifier.
_VOLATILE_MULTIMODAL = _words(
    """
    limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
    mm_encoder_tp_mode skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb interleave_mm_strings
    """
)
# The rest of LoadConfig decides which files are read, and what becomes of what they hold.
_VOLATILE_LOAD = _words(
    """
    download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load
    pt_load_map_location
    """
)
# The rest of KernelConfig names kernels, some of which round activations to eight or four bits.
_VOLATILE_KERNEL = _words(
    """
    ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
    enable_jit_warmup
    """
)
# Environment variables by which the same model computes in another precision, or something else altogether.
ENVIRONMENT = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION",
    "VLLM_DISABLED_KERNELS",
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_PLUGINS",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_USE_TRITON_AWQ",
)
# SpeculativeConfig fields that do not change a drafter's KV: the target, names, which drafts are made and accepted.
_VOLATILE_DRAFTS = _words(
    """
    target_model_config target_parallel_config draft_model_config draft_parallel_config draft_load_config
    model revision code_revision enforce_eager max_model_len num_speculative_tokens
    num_speculative_tokens_per_batch_size disable_padded_drafter_batch disable_eagle_block_drop
    use_local_argmax_reduction prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
    rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
    draft_sample_method
    """
)
# What users may write credentials into: a loader's storage, a plugin's settings.
_CONFIDENTIAL = frozenset({"additional", "load.model_loader_extra_config", "draft.load.model_loader_extra_config"})
# RoPE tables that are the same whatever the engine's max_model_len; others (longrope) choose factors by it.
_LENGTH_FREE_ROPE = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
_CPU_FLAGS = re.compile(r"avx\w*|amx\w*|neon|asimd\w*|sve\w*|bf16|i8mm|zvl\d+b|vxe\w*|altivec|vsx", re.ASCII)


def model_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """The model as the engine runs it, overrides applied; equal in two engines only if KV of equal tokens is equal.

    Weights excepted. Independent of paths, names, seeds and memory settings. Raises Unsupported (SW-712) if a setting
    has a value that cannot be written down so that another process would write the same.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = _without(model.hf_config.to_dict(), _VOLATILE_CONFIG)
    facts = {
        "model.config": canonical(config),
        "kv.dtype": canonical(cache.cache_dtype),
        "kv.dtype_skip_layers": canonical(getattr(cache, "kv_cache_dtype_skip_layers", [])),
        "kv.calculate_scales": canonical(getattr(cache, "calculate_kv_scales", False)),
        "kv.sharing_fast_prefill": canonical(cache.kv_sharing_fast_prefill),
        "additional": canonical(vllm_config.additional_config),
    }
    facts |= {f"env.{name}": os.environ.get(name, "") for name in ENVIRONMENT}
    facts |= _fields("model", model, _VOLATILE_MODEL)
    facts |= _fields("load", vllm_config.load_config, _VOLATILE_LOAD)
    facts |= _fields("kernel", vllm_config.kernel_config, _VOLATILE_KERNEL)
    if model.multimodal_config is not None:
        facts |= _fields("multimodal", model.multimodal_config, _VOLATILE_MULTIMODAL)
    if _length_matters(config):
        facts["model.max_model_len"] = canonical(model.max_model_len)
    return facts | _draft_facts(vllm_config)


def _draft_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """The drafter, where it keeps KV of its own. How many tokens it drafts matters only where it has a module for
    each of them."""
    if (drafts := drafter(vllm_config)) is None:
        return {}
    config = _without(drafts.draft_model_config.hf_config.to_dict(), _VOLATILE_CONFIG)
    facts = {
        "draft.config": canonical(config),
        "draft.lookahead": canonical(getattr(vllm_config, "num_prefill_lookahead_tokens", None)),
    }
    facts |= _fields("draft", drafts, _VOLATILE_DRAFTS)
    facts |= _fields("draft.model", drafts.draft_model_config, _VOLATILE_MODEL)
    if (load := getattr(drafts, "draft_load_config", None)) is not None:
        facts |= _fields("draft.load", load, _VOLATILE_LOAD)
    if _length_matters(config):
        facts["draft.max_model_len"] = canonical(drafts.draft_model_config.max_model_len)
    return facts


def layout_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """How the bytes of a page lie and who holds which part: engine, device, instruction set, specs, ranks.

    Says nothing of how many pages there are. `kv_cache_config` is the scheduler's. Raises Unsupported (SW-712) as
    `model_facts` does.
    """
    parallel, device = vllm_config.parallel_config, vllm_config.device_config.device_type
    facts = {
        "engine": engine(),
        "device": device,
        "machine": platform.machine(),
        "worker": canonical(parallel.worker_cls),
        "attention": canonical(vllm_config.attention_config),
        "layout": canonical(kv_cache_config.kv_cache_layout),
        "ranks.tensor": canonical(parallel.tensor_parallel_size),
        "ranks.pipeline": canonical(parallel.pipeline_parallel_size),
        "ranks.pipeline_partition": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "ranks.data": canonical(parallel.data_parallel_size),
        "ranks.decode_context": canonical(parallel.decode_context_parallel_size),
        "ranks.prefill_context": canonical(parallel.prefill_context_parallel_size),
        "ranks.kv_replicas": canonical(getattr(kv_cache_config, "kv_tp_replicas", 1)),
        "ranks.all2all": canonical(parallel.all2all_backend),
        "tensors": canonical(layer_pages(kv_cache_config)),
    }
    if device == "cuda":
        from vllm.platforms import current_platform

        facts["gpu"] = str(current_platform.get_device_capability())
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        facts[f"group.{number}.page_tokens"] = canonical(spec.block_size)
        facts[f"group.{number}.page_bytes"] = canonical(spec.page_size_bytes)
        for layer, (name, layer_spec) in enumerate(layer_specs(group)):
            facts[f"group.{number}.layer.{layer}"] = canonical(
                {"name": name, "page_bytes": layer_spec.page_size_bytes, "spec": layer_spec}
            )
        facts[f"group.{number}.isa"] = _isa(vllm_config, {id(s): s for _, s in layer_specs(group)}.values())
    return facts


def page_facts(kv_caches: Mapping[str, Any], num_pages: int) -> dict[str, str]:
    """How one rank's tensors lie, by layer: a backend, which vLLM may choose by what is installed, may divide pages,
    and then their bytes come in another order. Says nothing of how many pages there are."""
    return {
        f"page.{number}.{name}": canonical([tensor.shape[0] // num_pages, tensor.shape[1:], tensor.stride()[1:]])
        for number, (name, tensor) in enumerate(kv_caches.items())
    }


def told(facts: Mapping[str, str]) -> bytes:
    """What the well is told of these facts, so that people can see what differs. Settings that may hold credentials are
    withheld."""
    return facts_text({name: withheld(fact) if name in _CONFIDENTIAL else fact for name, fact in facts.items()})


def cache_groups(kv_cache_config: KVCacheConfig, shape: Shape) -> tuple[CacheGroup, ...]:
    """The groups of an engine, for people: what each keeps of a block."""
    found: list[CacheGroup] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = [spec for _, spec in layer_specs(group)]
        rule, parts = shape.rules[number], [part for part in shape.parts if part.group == number]
        tail = 0 if rule.kind is GroupKind.FULL else most_needed(rule, parts, shape.block_tokens, shape.recomputed)
        heads, sizes = ({getattr(spec, name, 0) for spec in specs} for name in ("num_kv_heads", "head_size"))
        found.append(
            CacheGroup(
                "mla" if type(specs[0]).__name__ == "MLAAttentionSpec" else rule.kind.value,
                len(specs),
                heads.pop() if len(heads) == 1 else 0,
                sizes.pop() if len(sizes) == 1 else 0,
                str(getattr(specs[0], "dtype", "")).removeprefix("torch."),
                shape.block_tokens,
                shape.shard_bytes * len(parts),
                rule.span,
                shape.shard_bytes * tail,
            )
        )
    return tuple(found[:MAX_GROUPS])


def engine() -> str:
    """Name and minor version of a plain release, "vllm 0.32"; any other version, such as a fork's "0.32.0+fork", a
    ".post1" or a development build, in full: what it computes is its own affair."""
    import vllm

    release = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", vllm.__version__, re.ASCII)
    return f"vllm {release[1]}.{release[2]}" if release else f"vllm {vllm.__version__}"


def _fields(prefix: str, config: Any, volatile: frozenset[str]) -> dict[str, str]:
    names = (field.name for field in dataclasses.fields(config))
    return {
        f"{prefix}.{name}": canonical(getattr(config, name))
        for name in names
        if name not in volatile and hasattr(config, name)
    }


def _without(value: Any, keys: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    return value


def _length_matters(config: Any) -> bool:
    """Whether KV may depend on max_model_len: through RoPE's factors, or through Llama 4's attention temperature."""
    if isinstance(config, list):
        return any(_length_matters(item) for item in config)
    if not isinstance(config, Mapping):
        return False
    if str(config.get("model_type", "")).startswith("llama4"):
        return True
    return any(_odd_rope(item) if "rope" in str(key) else _length_matters(item) for key, item in config.items())


def _odd_rope(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    kind = value.get("rope_type", value.get("type", "default"))
    return kind not in _LENGTH_FREE_ROPE or any(_odd_rope(item) for item in value.values())


def _isa(vllm_config: VllmConfig, specs: Any) -> str:
    """The instruction sets by which the CPU backend packs K; pages of one cannot be read by another."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    try:
        import torch
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        names = {_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype) for spec in specs}
        # vLLM ships a kernel library for each of these and loads one.
        library = [torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()]
    except (ImportError, AttributeError, TypeError, NotImplementedError):
        return f"unknown: {_cpu_flags()}"
    return canonical({"isa": names, "avx512": library[0], "avx512_bf16": library[1]})


def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read(1 << 16)
    except OSError:
        return platform.processor()
    return " ".join(sorted(set(filter(_CPU_FLAGS.fullmatch, text.split()))))
