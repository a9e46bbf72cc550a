"""Which facts separate namespaces, with vLLM's own config objects: every field of identity in turn, and what is none.

One baseline engine config; each case changes one thing about it and says whether the digest of the facts may stay.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("vllm", reason="needs vLLM")

import torch
import vllm
from vllm.config import CUDAGraphMode, KVTransferConfig, MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from stepwell.block.facts import digest_of, facts_of
from stepwell.client.fingerprint import fingerprint
from stepwell.engines.common.plan import Shape
from stepwell.engines.vllm.identity.facts import cache_groups, engine, layout_facts, model_facts, page_facts, told
from stepwell.engines.vllm.identity.groups import group_rules, zeroed_first
from stepwell.engines.vllm.identity.unsupported import unsupported
from stepwell.engines.vllm.identity.values import canonical
from stepwell.engines.vllm.identity.weights import NoWeightFiles, WeightFiles, weight_files
from stepwell.errors import Unsupported
from stepwell.protocol.messages import CacheGroup

from .build import build
from .local import setup_in

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return folder


def config_of(folder: Path, **arguments: Any) -> Any:
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, **arguments).create_engine_config()
    # Afterwards, so that no connector of that name need be registered for these tests.
    config.kv_transfer_config = KVTransferConfig(kv_connector="StepwellConnector", kv_role="kv_both")
    return config


def spec(**changes: Any) -> FullAttentionSpec:
    values: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**values | changes)


def pages(*specs: Any, layout: str | None = "LBHNC", num_blocks: int = 8) -> KVCacheConfig:
    groups, tensors = [KVCacheGroupSpec(layer_names=LAYERS, kv_cache_spec=one) for one in specs or (spec(),)], []
    if len(groups) > 1:
        size = groups[0].kv_cache_spec.page_size_bytes
        tensors = [KVCacheTensor(2 * size * num_blocks, LAYERS, size * num_blocks, size)]
    return KVCacheConfig(num_blocks, tensors, groups, kv_cache_layout=layout, hash_block_size=128)


def window(span: int = 64, **changes: Any) -> SlidingWindowSpec:
    values: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**values | {"sliding_window": span} | changes)


def chunk(span: int) -> ChunkedLocalAttentionSpec:
    values: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return ChunkedLocalAttentionSpec(**values | {"attention_chunk_size": span})


def digests(config: Any, kv_cache_config: KVCacheConfig) -> tuple[bytes, bytes]:
    return digest_of(model_facts(config)), digest_of(layout_facts(config, kv_cache_config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def base(folder: Path) -> tuple[bytes, bytes]:
    return digests(config_of(folder), pages())


# --- what the well is told ---


def test_the_well_is_told_facts_and_no_credentials(folder: Path) -> None:
    keys = {"model_loader_extra_config": {"s3_secret": "umbriel"}, "additional_config": {"token": "umbriel"}}
    facts = model_facts(config_of(folder, **keys)) | layout_facts(config_of(folder), pages())
    assert "umbriel" in str(facts)
    said = facts_of(told(facts))
    assert said.keys() == facts.keys() and "umbriel" not in str(said)
    assert said["group.0.layer.0"] == facts["group.0.layer.0"]
    plain = facts_of(told(model_facts(config_of(folder))))
    assert {name for name in plain if plain[name] != said[name]} == {"additional", "load.model_loader_extra_config"}


def test_cache_groups_are_said_by_kind_and_shape() -> None:
    shape = Shape(128, 256, 4096, 1)
    (one,) = cache_groups(pages(), shape)
    assert one == CacheGroup("full", 2, 2, 64, "bfloat16", 256, 4096)
    uneven = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={LAYERS[0]: spec(), LAYERS[1]: spec(head_size=32)})
    assert cache_groups(pages(uneven), shape)[0].head_size == 0
    several = pages(window(100), spec(block_size=64))
    shape = Shape(128, 256, 4096, 1, groups=group_rules(several))
    assert [(group.kind, group.shard_bytes) for group in cache_groups(several, shape)] == [
        ("sliding_window", 4096),
        ("full", 2 * 4096),
    ]


# --- the model -------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
}


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    ("facts", "arguments"),
    [
        ("model.config", {"hf_overrides": {"rope_parameters": YARN}}),
        ("model.config", {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}}),
        ("model.config", {"hf_overrides": {"sliding_window": 64}}),
        ("model.config", {"hf_overrides": {"attn_logit_softcapping": 50.0}}),
        ("model.config", {"hf_overrides": {"rms_norm_eps": 1e-6}}),
        ("model.config", {"hf_overrides": lambda config: config.update({"num_hidden_layers": 1}) or config}),
        ("model.dtype", {"dtype": "float32"}),
        ("kv.dtype", {"kv_cache_dtype": "fp8_e5m2"}),
        ("model.disable_sliding_window", {"disable_sliding_window": True}),
        ("model.quantization", {"quantization": "fp8"}),
        ("model.code_revision", {"code_revision": "other"}),
    ],
)
def test_the_effective_model_config_is_identity(folder: Path, facts: str, arguments: dict[str, Any]) -> None:
    one, other = model_facts(config_of(folder)), model_facts(config_of(folder, **arguments))
    assert facts in changed(one, other)
    assert changed(one, other) <= {facts, "model.config", "model.quantization_config"}
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    ("fact", "path", "value"),
    [
        ("model.model_impl", "model_config.model_impl", "transformers"),
        ("model.model_class_overrides", "model_config.model_class_overrides", {"LlamaForCausalLM": "own:Llama"}),
        ("kv.calculate_scales", "cache_config.calculate_kv_scales", True),
        ("kv.dtype_skip_layers", "cache_config.kv_cache_dtype_skip_layers", ["0"]),
        ("kv.sharing_fast_prefill", "cache_config.kv_sharing_fast_prefill", True),
        ("load.load_format", "load_config.load_format", "pt"),
        ("load.ignore_patterns", "load_config.ignore_patterns", ["*.bin"]),
        ("load.model_loader_extra_config", "load_config.model_loader_extra_config", {"num_threads": 2}),
        ("load.safetensors_load_strategy", "load_config.safetensors_load_strategy", "torchao"),
        ("kernel.moe_backend", "kernel_config.moe_backend", "marlin"),
        ("kernel.linear_backend", "kernel_config.linear_backend", "marlin"),
        ("additional", "additional_config", {"precision": "low"}),
    ],
)
def test_settings_that_take_long_or_another_machine_to_build(folder: Path, fact: str, path: str, value: Any) -> None:
    config = config_of(folder)
    before = model_facts(config)
    _set(path, value)(config)
    assert changed(before, model_facts(config)) == {fact}


def test_multimodal_processing_is_identity_and_its_caches_are_not(folder: Path) -> None:
    config = config_of(folder)
    config.model_config.multimodal_config = MultiModalConfig()
    before = model_facts(config)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=1, skip_mm_profiling=True)
    assert model_facts(config) == before
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs={"max_pixels": 9})
    assert changed(before, model_facts(config)) == {"multimodal.mm_processor_kwargs"}


@pytest.mark.parametrize(
    "config",
    [{"rope_scaling": YARN}, {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}],
    ids=["rope", "quantization"],
)
def test_the_config_file_is_identity(tmp_path: Path, folder: Path, config: dict[str, Any]) -> None:
    other = config_of(model_folder(tmp_path / "tiny", **config))
    assert "model.config" in changed(model_facts(config_of(folder)), model_facts(other))


def test_an_override_is_the_same_as_the_config_that_it_makes(folder: Path, tmp_path: Path) -> None:
    overridden = config_of(folder, hf_overrides={"rope_parameters": YARN})
    written = config_of(model_folder(tmp_path / "tiny", rope_parameters=YARN))
    assert digest_of(model_facts(overridden)) == digest_of(model_facts(written))


def test_length_counts_only_where_it_alters_rope(folder: Path) -> None:
    def digest(rope: dict[str, Any], length: int) -> bytes:
        config = config_of(folder, hf_overrides={"rope_parameters": rope}, max_model_len=length)
        return digest_of(model_facts(config))

    assert digest(YARN, 128) == digest(YARN, 256)
    assert digest(LONGROPE, 128) != digest(LONGROPE, 512)


@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": 7},
        {"served_model_name": "another"},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 777},
        {"max_model_len": 256},
        {"enforce_eager": True},
        {"disable_log_stats": True},
        {"max_logprobs": 3},
        {"num_gpu_blocks_override": 9},
        {"enable_prefix_caching": False},
        {"generation_config": "vllm"},
        {"gpu_memory_utilization": 0.5},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_changes_no_kv_is_no_identity(folder: Path, base: tuple[bytes, bytes], arguments: dict[str, Any]) -> None:
    assert digests(config_of(folder, **arguments), pages(num_blocks=99)) == base


def test_path_and_writer_of_the_config_are_no_identity(tmp_path: Path, base: tuple[bytes, bytes]) -> None:
    other = model_folder(tmp_path / "renamed", transformers_version="4.1.0", _name_or_path="someone/else")
    assert digests(config_of(other), pages()) == base


# --- the layout ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv_cache_config",
    [
        lambda: pages(spec(block_size=32)),
        lambda: pages(spec(num_kv_heads=1)),
        lambda: pages(spec(head_size=32)),
        lambda: pages(spec(dtype=torch.float16)),
        lambda: pages(spec(page_size_padded=spec().page_size_bytes + 4096)),
        lambda: pages(spec(sliding_window=64)),
        lambda: pages(layout="BLHNC"),
        lambda: pages(spec(), window()),
        lambda: pages(
            UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={LAYERS[0]: spec(), LAYERS[1]: spec(head_size=32)})
        ),
    ],
    ids=["page", "heads", "head size", "dtype", "padding", "window", "order", "groups", "one layer"],
)
def test_the_page_layout_is_identity(
    folder: Path, base: tuple[bytes, bytes], kv_cache_config: Callable[[], KVCacheConfig]
) -> None:
    assert digest_of(layout_facts(config_of(folder), kv_cache_config())) != base[1]


def test_the_pages_of_each_layer_are_identity(tmp_path: Path) -> None:
    """The scheduler's copy of the configuration tells one spec for layers whose pages differ in size."""
    one, other = (build(setup_in(tmp_path / name, uneven=name == "b")) for name in "ab")
    facts = [layout_facts(each.vllm_config, each.scheduler_kv) for each in (one, other)]
    assert "tensors" in changed(*facts)


@pytest.mark.parametrize(
    ("fact", "path", "value"),
    [
        ("ranks.all2all", "parallel_config.all2all_backend", "deepep_low_latency"),
        ("worker", "parallel_config.worker_cls", "another.Worker"),
    ],
)
def test_who_computes_is_identity(folder: Path, fact: str, path: str, value: Any) -> None:
    config = config_of(folder)
    before = layout_facts(config, pages())
    _set(path, value)(config)
    assert changed(before, layout_facts(config, pages())) == {fact}


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_the_shape_of_ranks_is_identity(folder: Path, base: tuple[bytes, bytes], size: str) -> None:
    config = config_of(folder, **{size: 2})
    assert digest_of(layout_facts(config, pages())) != base[1]


def test_the_attention_backend_is_identity(folder: Path, base: tuple[bytes, bytes]) -> None:
    config = config_of(folder, attention_backend="CPU_ATTN")
    assert digest_of(layout_facts(config, pages())) != base[1]


@pytest.mark.parametrize("feature", ["_is_amx_tile_supported", "_is_avx512_supported", "_is_avx512_bf16_supported"])
def test_the_instruction_set_is_identity(folder: Path, monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    seen = set()
    for supported in (False, True):
        monkeypatch.setattr(torch.cpu, feature, lambda value=supported: value)
        seen.add(digest_of(layout_facts(config_of(folder), pages())))
    assert len(seen) == 2


def test_an_unknown_way_to_pack_falls_back_to_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    facts = layout_facts(config_of(folder), pages())
    assert facts["group.0.isa"].startswith("unknown: ")
    assert len(facts["group.0.isa"]) > len("unknown: ")


def test_the_engines_minor_version_is_identity(
    folder: Path, base: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(version: str) -> tuple[str, bytes]:
        monkeypatch.setattr(vllm, "__version__", version)
        return engine(), digest_of(layout_facts(config_of(folder), pages()))

    assert at("0.97.0") == at("0.97.3")
    assert at("0.97.0")[0] == "vllm 0.97"
    versions = ["0.97.0", "0.98.0", "1.97.0", "0.97.0rc1", "0.97.0.dev3+gabc", "0.97.0.dev4+gabc"]
    versions += ["0.97.0+fork", "0.97.1+fork", "0.97.0+cpu", "0.97.1.post2", "0.97.1.post3"]
    assert len({at(version) for version in versions}) == len(versions)
    assert all(at(version)[1] != base[1] for version in versions)


# --- values as text --------------------------------------------------------------------------


def test_canonical_text_is_stable_and_tells_values_apart() -> None:
    assert canonical({"b": 1, "a": {3, 1, 2}}) == canonical({"a": {2, 3, 1}, "b": 1}) == '{"a":[1,2,3],"b":1}'
    values = [
        None,
        True,
        1,
        1.5,
        "1",
        "",
        [],
        {},
        {1: 2},
        {"1": 2},
        torch.float16,
        torch.bfloat16,
        b"1",
        Fraction(1, 2),
    ]
    values += [CUDAGraphMode.NONE, CUDAGraphMode.FULL, spec(), spec(block_size=32), torch.zeros(2), torch.zeros(2, 1)]
    values += [Path("1"), int, FullAttentionSpec]
    assert len({canonical(value) for value in values}) == len(values)


def test_another_process_writes_the_same_text() -> None:
    code = (
        "from stepwell.engines.vllm.identity.values import canonical\n"
        "print(canonical({'b': {'x', 'y', 'z'}, 'a': frozenset({'p', 'q', (1, 2)}), 3: {'k', 4, None}}), end='')"
    )
    texts = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)})
        for seed in range(6)
    }
    assert len(texts) == 1


def test_a_value_without_a_stable_text_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), lambda: None, functools.partial(int, base=2), loop):
        with pytest.raises(Unsupported) as caught:
            canonical({"deep": [value]})
        assert caught.value.code == "SW-712"


# --- what is not served ----------------------------------------------------------------------


def test_the_plain_engine_is_served(folder: Path) -> None:
    config = config_of(folder)
    assert unsupported(config, pages()) is None
    uniform = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=dict.fromkeys(LAYERS, spec()))
    assert unsupported(config, pages(uniform)) is None
    assert unsupported(config_of(folder, tensor_parallel_size=2), pages()) is None


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """For states that vLLM refuses to build on this machine: the same objects, one attribute further."""

    def change(config: Any) -> None:
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, config), name, value)

    return change


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("SW-703", _set("device_config.device_type", "xpu")),
        ("SW-714", _set("device_config.device_type", "cuda")),  # with this torch, which is built for CPUs
        ("SW-705", _set("parallel_config.nnodes", 2)),
        ("SW-705", _set("parallel_config.distributed_executor_backend", "ray")),
        ("SW-706", _set("kv_transfer_config.kv_role", "kv_producer")),
        ("SW-706", _set("kv_transfer_config", None)),
        ("SW-708", _set("speculative_config", object())),
        ("SW-712", _set("parallel_config.decode_context_parallel_size", 2)),
        ("SW-712", _set("parallel_config.prefill_context_parallel_size", 2)),
        ("SW-712", _set("model_config.is_encoder_decoder", True)),
        ("SW-712", _set("cache_config.calculate_kv_scales", True)),
    ],
)
def test_engines_that_are_not_served(folder: Path, code: str, change: Callable[[Any], None]) -> None:
    config = config_of(folder)
    change(config)
    refused = unsupported(config, pages())
    assert isinstance(refused, Unsupported)
    assert refused.code == code


@pytest.mark.parametrize(
    ("code", "kv_cache_config"),
    [
        ("SW-704", lambda: pages(window(), window(128))),
        ("SW-704", lambda: pages(spec(), window(block_size=96))),
        ("SW-704", lambda: pages(spec(), chunk(192))),
        ("SW-707", lambda: pages(layout=None)),
        ("SW-707", lambda: pages(layout="XYZ")),
        ("SW-707", lambda: pages(layout="LHBNC")),
        ("SW-712", lambda: dataclasses.replace(pages(), kv_cache_groups=[])),
        (
            "SW-712",
            lambda: pages(window()),
        ),
        ("SW-712", lambda: pages(spec(non_causal=True))),
    ],
)
def test_layouts_that_are_not_served(folder: Path, code: str, kv_cache_config: Callable[[], KVCacheConfig]) -> None:
    refused = unsupported(config_of(folder), kv_cache_config())
    assert isinstance(refused, Unsupported)
    assert refused.code == code


STATES = {
    "all": lambda config, pages: setattr(config.cache_config, "mamba_cache_mode", "all"),
    "drafts": lambda config, pages: setattr(config, "speculative_config", SimpleNamespace(method="ngram")),
    "places inside a block": lambda config, pages: setattr(pages, "hash_block_size", 32),
}


@pytest.mark.parametrize("what", ["", *STATES])
def test_states_are_served_where_a_page_tells_their_prefix(folder: Path, what: str) -> None:
    state = MambaSpec(block_size=128, shapes=((4, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")
    config, states = config_of(folder), pages(state, spec())
    config.cache_config.mamba_cache_mode = "align"
    assert unsupported(config, states) is None
    if what:
        STATES[what](config, states)
        refused = unsupported(config, states)
        assert refused is not None and refused.code == "SW-704"


# --- on CUDA ---------------------------------------------------------------------------------


@pytest.fixture
def cuda_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine on CUDA, as far as configs tell; torch says that it was built for that."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = config_of(folder)
    config.device_config.device_type = "cuda"
    return config


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_compact_layouts_are_served(folder: Path, cuda_config: Any, layout: str) -> None:
    for config in (config_of(folder), cuda_config):
        assert unsupported(config, pages(layout=layout)) is None


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC", "XYZ", None])
def test_other_layouts_are_not(cuda_config: Any, layout: str | None) -> None:
    refused = unsupported(cuda_config, pages(layout=layout))
    assert isinstance(refused, Unsupported) and refused.code == "SW-707"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_maps_pages_piece_by_piece(
    cuda_config: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    refused = unsupported(cuda_config, pages())
    assert isinstance(refused, Unsupported) and refused.code == "SW-714" and name in str(refused)
    monkeypatch.setenv(name, "expandable_segments:False")
    assert unsupported(cuda_config, pages()) is None


def test_a_torch_for_other_gpus(cuda_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    refused = unsupported(cuda_config, pages())
    assert isinstance(refused, Unsupported) and refused.code == "SW-714" and "ROCm" in str(refused)


def test_pages_that_the_engine_zeroes_before_it_tells(
    cuda_config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not zeroed_first(cuda_config, pages())
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True, raising=False)
    assert zeroed_first(cuda_config, pages()) and not zeroed_first(config_of(folder), pages())
    assert unsupported(cuda_config, pages()) is None


def test_how_a_backend_divides_pages_is_part_of_the_layout() -> None:
    """vLLM chooses it by what is installed, and tells the workers only."""
    pages, tokens, heads, content = 6, 64, 2, 8

    def facts(pages: int, pieces: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> str:
        whole = torch.zeros(pages * pieces, heads, tokens // pieces, content).permute(order).contiguous()
        return digest_of(page_facts({LAYERS[0]: whole.permute([order.index(n) for n in range(4)])}, pages))

    by_tokens = (0, 2, 1, 3)
    assert facts(pages, 1) == facts(2 * pages, 1), "not how many"
    assert len({facts(pages, 1), facts(pages, 2), facts(pages, 4), facts(pages, 1, by_tokens)}) == 4


def test_the_gpu_is_part_of_the_layout(cuda_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides which attention backend there is, and what a page of it looks like."""
    from vllm.platforms import current_platform

    def of(capability: str) -> dict[str, str]:
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: capability)
        return layout_facts(cuda_config, pages())

    assert of("9.0") == of("9.0") != of("10.0")


# --- the files of the weights ----------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def found(config: Any, folder: Path) -> list[str]:
    result = weight_files(config)
    assert isinstance(result, WeightFiles), result
    return [str(path.relative_to(folder)) for path in result.paths]


def test_a_folders_weights_with_their_indexes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    kept = ["model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "part/model.pt"]
    kept += ["x.gguf", "x.npz", "x.pth", "preprocessor_config.json", "quantize_config.json"]
    left = ["optimizer.pt", "training_args.bin", "tokenizer.json", "modeling.py"]
    left += ["original/consolidated.00.pth", "checkpoint-5/model.safetensors", ".cache/model.safetensors", "README.md"]
    touch(folder, *kept, *left)
    (folder / "part" / "loop").symlink_to(folder)
    config = config_of(folder)
    inside = [name for name in found(config, folder) if "loop" not in name]
    assert inside == sorted(kept, key=lambda name: folder / name)
    config.model_config.trust_remote_code = True
    assert "modeling.py" in found(config, folder)


def test_original_counts_where_it_is_all_there_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    touch(folder, "original/consolidated.00.pth", "original/params.json")
    assert found(config_of(folder), folder) == ["original/consolidated.00.pth", "original/params.json"]


def test_a_single_file(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    touch(folder, "a.gguf", "b.gguf")
    config = config_of(folder)
    config.model_config.model = str(folder / "a.gguf")
    assert found(config, folder) == ["a.gguf"]


def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path: Path) -> None:
    hub, commit = tmp_path / "hub" / "models--some--model", "0" * 40
    touch(hub, "blobs/abc", f"snapshots/{commit}/config.json")
    (hub / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/abc")
    touch(hub, "refs/main")
    (hub / "refs" / "main").write_text(commit)
    config = config_of(model_folder(tmp_path / "tiny"), download_dir=str(tmp_path / "hub"))
    config.model_config.model = "some/model"
    assert found(config, hub / "snapshots" / commit) == ["model.safetensors"]
    config.model_config.revision = "another"
    assert isinstance(weight_files(config), NoWeightFiles)


def _sharded(pattern: str) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.load_config.load_format = "sharded_state"
        config.load_config.model_loader_extra_config = {"pattern": pattern}

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("load_config.load_format", "dummy"),
        _set("load_config.load_format", "runai_streamer"),
        _set("load_config.load_format", "tensorizer"),
        _set("load_config.load_format", "npcache"),
        _set("load_config.load_format", "a_plugin"),
        _sharded("rank-{rank}.weights"),
        _sharded("../other/rank-{rank}.safetensors"),
        _set("model_config.model_weights", "s3://bucket/model"),
        _set("model_config.model", "s3://bucket/model"),
        _set("model_config.model", "not a model / at all"),
        _set("model_config.hf_config.text_model_id", "someone/language-model"),
        lambda config: os.remove(Path(config.model_config.model) / "model.safetensors"),
    ],
)
def test_weights_that_no_local_file_holds(tmp_path: Path, change: Callable[[Any], None]) -> None:
    folder = model_folder(tmp_path / "tiny")
    touch(folder, "model.safetensors")
    config = config_of(folder)
    assert found(config, folder) == ["model.safetensors"]
    change(config)
    result = weight_files(config)
    assert isinstance(result, NoWeightFiles)
    assert result.reason


def test_a_loader_of_a_plugin_reads_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it took the name of a format that vLLM knows."""
    from vllm.model_executor import model_loader

    class Loader(model_loader.DefaultModelLoader):
        pass

    folder = model_folder(tmp_path / "tiny")
    touch(folder, "model.safetensors")
    config = config_of(folder, load_format="safetensors")
    assert found(config, folder) == ["model.safetensors"]
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "safetensors", Loader)
    assert isinstance(weight_files(config), NoWeightFiles)


FORMATS = ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt"]
BESIDE_EACH_OTHER = [
    ["model.safetensors"],
    ["model.safetensors", "model.pt"],
    ["model.safetensors", "model.bin", "consolidated.safetensors"],
    ["consolidated.00.pt", "pytorch_model.bin", "training_args.bin"],
    ["a-1.safetensors", "a-2.safetensors", "b.safetensors", "model.safetensors.index.json"],
    ["adapter_model.safetensors", "optimizer.safetensors", "scheduler.bin", "rng_state.pt", "optimizer.pt"],
]


def test_whatever_other_files_the_loader_reads_is_another_namespace(tmp_path: Path) -> None:
    """vLLM's own choice among the files of a folder, for each format that reads them there."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    read_under: dict[tuple[Any, ...], set[tuple[str, ...]]] = {}
    choices = set()
    for number, names in enumerate(BESIDE_EACH_OTHER):
        folder = model_folder(tmp_path / str(number))
        for name in names:
            (folder / name).write_text(name)
        if "model.safetensors.index.json" in names:
            index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for load_format in FORMATS:
            config = config_of(folder, load_format=load_format)
            try:
                chosen = DefaultModelLoader(config.load_config)._prepare_weights(str(folder), None, None, True, None)[1]
            except (RuntimeError, FileNotFoundError):
                continue  # that engine does not start
            files = weight_files(config)
            assert isinstance(files, WeightFiles)
            assert {Path(path) for path in chosen} <= set(files.paths), (names, load_format)
            read = tuple(sorted(os.path.relpath(path, folder) for path in chosen))
            namespace = fingerprint(files.paths, None), digest_of(model_facts(config))
            read_under.setdefault(namespace, set()).add(read)
            choices.add(read)
    assert len(choices) > 8, "the folders do not differ enough"
    assert all(len(read) == 1 for read in read_under.values())
