"""The offline configuration of a vLLM engine that has a scheduler and connectors but no model.

`Setup` says what a test wants; `build` makes of it the config objects that a real engine core makes at start, by the
same functions and in the same order, from a folder with a config.json and a few bytes of weights. No network, no
tokenizer. Knows nothing of stepwell.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # before vLLM 0.33, which makes the groups first
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None
try:
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens
except ImportError:  # before vLLM 0.32, where hits had no alignment of their own
    resolve_cache_hit_alignment_tokens = None

KNOWS_REPLICAS = "max_tp_shards" in FullAttentionSpec.__dataclass_fields__
"""vLLM 0.32 tells connectors which ranks hold the same KV."""

DTYPE = torch.float32
STATE = -1
"""In place of a layer's window: it keeps the state behind the last token, as recurrent layers do."""
VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine. Sizes in tokens unless named otherwise; the defaults make small pools that fill quickly."""

    connector: str
    """Class name, or the name that an entry point registered."""
    model_dir: Path
    """Where config.json and model.safetensors are written; the model's name for the engine."""
    module: str | None = None
    """Module of the class; None: found by name among the registered connectors."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`."""
    load_failure_policy: str | None = None
    """`kv_load_failure_policy`; None leaves vLLM's default."""
    kv_role: str = "kv_both"
    engine_id: str | None = None
    page: int = 16
    num_pages: int = 65
    """Pages of the engine's pool, one of which vLLM keeps as its null block."""
    ranks: int = 1
    """Tensor-parallel size: worker halves, each with its own KV tensors."""
    layers: int = 2
    kv_heads: int = 2
    """Over all ranks, each once; where they are fewer than ranks, several ranks hold the same."""
    head_size: int = 8
    windows: tuple[int, ...] = (0,)
    """How many of the last tokens a layer attends to (0: all; STATE: none, it has a state), in turn by layers. Layers
    that differ in it are in different cache groups."""
    chunks: bool = False
    """Windows are chunks, as of chunked local attention: a layer attends to the tokens of the chunk that a token is
    in."""
    one_group: bool = False
    """All layers are one cache group that keeps all tokens, as vLLM's hybrid KV cache manager is switched off."""
    dense: bool = False
    """Windows are kept at every page, and not only where prompts end."""
    uneven: bool = False
    """Layer n has heads of n + 1 times this size, so that its pages are larger."""
    batch_tokens: int = 256
    """Budget of a step; longer prompts are prefilled in chunks."""
    max_seqs: int = 16
    max_model_len: int | None = None
    """None: what the pool can hold."""
    prefix_caching: bool = True
    policy: str = "fcfs"
    long_prefill_threshold: int = 0
    async_scheduling: bool = False
    """Schedule step N+1 before the output of step N is processed, as CUDA does by default."""
    runner_v2: bool = False
    """Hooks in the order of CUDA's default model runner, which lists resumed requests among the new ones."""
    chunked_prefill: bool = True
    drafts: int = 0
    """Tokens that are drafted for each request that decodes; some of them are wrong."""
    drafter: str = "ngram"
    """How: by a method of vLLM's. All but n-grams have a layer with KV of its own."""
    zeroed_first: bool = False
    """Pages that a step takes are overwritten before the connector is told of it, as by CUDA's default model runner."""
    data_rank: int | None = None
    """Of an engine in a group of two that share the requests; None: an engine by itself."""
    multimodal: bool = False
    """The model takes other inputs beside tokens; none is ever sent."""
    lora: bool = False
    """Adapters are switched on; none is ever loaded."""
    weights: int = 0
    """Names the parameters: another number is another model under the same name."""

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.kv_heads // self.ranks)

    @property
    def replicas(self) -> int:
        """Consecutive ranks that have the same heads."""
        return max(1, self.ranks // self.kv_heads)

    @property
    def words(self) -> int:
        """64-bit words of K and V together, per token and head, in the largest layer."""
        return 2 * self.head_size_of(self.layers - 1) * DTYPE.itemsize // 8

    def window_of(self, layer: int) -> int:
        return self.windows[layer % len(self.windows)]

    def head_size_of(self, layer: int) -> int:
        return self.head_size * (layer + 1 if self.uneven else 1)


@dataclass(frozen=True, slots=True)
class Built:
    """The config objects of one engine start; a rank's own copy of the first is made by the worker."""

    vllm_config: VllmConfig
    scheduler_kv: KVCacheConfig
    worker_kv: list[KVCacheConfig]
    block_size: int
    hash_block_size: int


def build(setup: Setup) -> Built:
    """Everything that exists before the connectors do.

    Raises what vLLM raises for a configuration it refuses, such as a `max_model_len` beyond the pool.
    """
    if setup.module is None:
        load_general_plugins()
    write_model(setup)
    config = _vllm_config(setup)
    specs = [_specs(setup) for _ in range(setup.ranks)]
    layout = resolve_kv_cache_layout(config, [["LBHNC"]] * setup.ranks, list(specs[0].values()))
    groups = [get_global_kv_cache_groups(config, specs)] if get_global_kv_cache_groups is not None else []
    worker_kv = get_kv_cache_configs(config, specs, [1 << 40] * setup.ranks, *groups)
    for kv in worker_kv:
        kv.kv_cache_layout = layout.name
    scheduler_kv = generate_scheduler_kv_cache_config(worker_kv)
    config.cache_config.num_gpu_blocks = scheduler_kv.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler_kv, config)
    for kv in (*worker_kv, scheduler_kv):
        kv.hash_block_size = hash_block_size
        if resolve_cache_hit_alignment_tokens is not None:
            kv.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
                scheduler_kv, config, block_size, hash_block_size
            )
    return Built(config, scheduler_kv, [copy.deepcopy(kv) for kv in worker_kv], block_size, hash_block_size)


def write_model(setup: Setup) -> None:
    """config.json and a weights file whose bytes differ with `weights`; left alone where nothing changes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": setup.kv_heads * setup.head_size,
        "intermediate_size": 2 * setup.kv_heads * setup.head_size,
        "num_attention_heads": max(setup.kv_heads, setup.ranks),
        "num_key_value_heads": setup.kv_heads,
        "head_dim": setup.head_size,
        "num_hidden_layers": setup.layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1 << 18,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    header = json.dumps({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<q", setup.weights)
    setup.model_dir.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", json.dumps(config).encode()), ("model.safetensors", weights)):
        path = setup.model_dir / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def _vllm_config(setup: Setup) -> VllmConfig:
    max_model_len = setup.max_model_len or (setup.num_pages - 1) * setup.page
    model = ModelConfig(
        model=str(setup.model_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=max_model_len,
        enforce_eager=True,
    )
    if setup.multimodal:
        model.multimodal_config = MultiModalConfig(limit_per_prompt={"image": 0})
    scheduler = SchedulerConfig(
        max_num_batched_tokens=setup.batch_tokens,
        max_num_seqs=setup.max_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=setup.chunked_prefill,
        is_encoder_decoder=False,
        disable_hybrid_kv_cache_manager=True if setup.one_group else None,
        policy=setup.policy,
        long_prefill_token_threshold=setup.long_prefill_threshold,
    )
    cache = CacheConfig(
        block_size=setup.page,
        cache_dtype="auto",
        enable_prefix_caching=setup.prefix_caching,
        num_gpu_blocks_override=setup.num_pages,
        prefix_cache_retention_interval=None if setup.dense else 0,
        **({"mamba_block_size": setup.page, "mamba_cache_mode": "align"} if STATE in setup.windows else {}),
    )
    transfer: dict[str, Any] = {
        "kv_connector": setup.connector,
        "kv_connector_module_path": setup.module,
        "kv_role": setup.kv_role,
        "kv_connector_extra_config": copy.deepcopy(setup.extra),
    }
    if setup.load_failure_policy is not None:
        transfer["kv_load_failure_policy"] = setup.load_failure_policy
    if setup.engine_id is not None:
        transfer["engine_id"] = setup.engine_id
    parallel = ParallelConfig(
        tensor_parallel_size=setup.ranks, distributed_executor_backend="mp", **_data_parallel(setup)
    )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=parallel,
        speculative_config=_drafts(setup, model, parallel),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(),
        kv_transfer_config=KVTransferConfig(**transfer),
        lora_config=LoRAConfig() if setup.lora else None,
    )
    config.scheduler_config.async_scheduling = setup.async_scheduling  # the CPU platform has just forced it off
    return config


def _drafts(setup: Setup, model: ModelConfig, parallel: ParallelConfig) -> SpeculativeConfig | None:
    if not setup.drafts:
        return None
    kind: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    if setup.drafter != "ngram":
        folder = setup.model_dir.with_name("drafter")
        folder.mkdir(exist_ok=True)
        config = json.loads((setup.model_dir / "config.json").read_text()) | {"num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
        kind = {"model": str(folder)}
    return SpeculativeConfig(
        method=setup.drafter,
        num_speculative_tokens=setup.drafts,
        target_model_config=model,
        target_parallel_config=parallel,
        **kind,
    )


def drafted_name(setup: Setup) -> str | None:
    """The name of the drafter's layer, if it has one."""
    if not setup.drafts or setup.drafter == "ngram":
        return None
    behind = "draft_model.model.layers.0" if setup.drafter == "draft_model" else f"model.layers.{setup.layers}"
    return f"{behind}.self_attn.attn"


def _data_parallel(setup: Setup) -> dict[str, Any]:
    if setup.data_rank is None:
        return {}
    return {"data_parallel_size": 2, "data_parallel_rank": setup.data_rank, "data_parallel_size_local": 2}


def _specs(setup: Setup) -> dict[str, KVCacheSpec]:
    """What the model's attention layers would say of one rank's KV."""
    heads = {"max_tp_shards": setup.kv_heads} if KNOWS_REPLICAS else {}
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(setup.layers):
        span = setup.window_of(layer)
        if span == STATE:
            shape = (setup.heads_per_rank, setup.words)
            specs[f"model.layers.{layer}.mixer"] = MambaSpec(
                block_size=setup.page,
                shapes=(shape, shape),
                dtypes=(torch.int64, torch.int64),
                page_size_padded=8 * setup.page * setup.heads_per_rank * setup.words,
                mamba_cache_mode="align",
            )
            continue
        kind, spans = FullAttentionSpec, {}
        if span:
            kind = ChunkedLocalAttentionSpec if setup.chunks else SlidingWindowSpec
            spans = {"attention_chunk_size" if setup.chunks else "sliding_window": span}
        specs[f"model.layers.{layer}.self_attn.attn"] = kind(
            block_size=setup.page,
            num_kv_heads=setup.heads_per_rank,
            head_size=setup.head_size_of(layer),
            dtype=DTYPE,
            **spans,
            **heads,
        )
    if (name := drafted_name(setup)) is not None:
        shape = {"num_kv_heads": setup.heads_per_rank, "head_size": setup.head_size_of(0)}
        specs[name] = FullAttentionSpec(block_size=setup.page, dtype=DTYPE, **shape, **heads)
    return specs
