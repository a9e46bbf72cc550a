"""Every option of vLLM is identity, served, inert or irrelevant, and what the table in options.toml says is true.

A version of vLLM with an option that the table does not have fails here, with what to do about it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import enum
import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("vllm", reason="needs vLLM")

import torch
import vllm
import vllm.envs
from vllm.config import MultiModalConfig, VllmConfig
from vllm.platforms import CpuArchEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from stepwell.engines.vllm.identity.adapters import lora_facts
from stepwell.engines.vllm.identity.facts import ENVIRONMENT as IN_IDENTITY
from stepwell.engines.vllm.identity.facts import layout_facts, model_facts
from stepwell.engines.vllm.identity.unsupported import unsupported

from .options import CLASSES, ENVIRONMENT, Row, fields_of, parts_of, row_of_variable, rows
from .test_identity import changed, config_of, model_folder, pages

TESTS = Path(__file__).parents[2]
MINOR = ".".join(vllm.__version__.split(".")[:2])
TABLE = rows()
WHOLE = {row.name for row in TABLE if row.kind in ("identity", "inert")}
HAS = {f"{of}.{field}" for of, field in fields_of(VllmConfig, WHOLE)}
WHAT_TO_DO = (
    "is not in tests/engines/vllm/options.toml. Find out what it does: if KV of given tokens may differ by more than "
    "rounding, make it identity (a fact in identity/facts.py) or inert (a check in `unsupported`); if it changes which "
    "tokens an engine asks for or when, serve it and test a recall; else it is irrelevant, and the row says why. Then "
    "run scripts/options_page.py"
)


def test_every_option_of_this_vllm_is_in_the_table() -> None:
    named = {row.name for row in TABLE}
    missing = sorted(HAS - named)
    assert not missing, f"vLLM {vllm.__version__}: {', '.join(missing)} {WHAT_TO_DO}"
    variables = [name for name in vllm.envs.environment_variables if not row_of_variable(TABLE, name)]
    assert not variables, f"vLLM {vllm.__version__}: environment variable {', '.join(variables)} {WHAT_TO_DO}"


def test_the_table_has_no_option_that_this_vllm_lacks() -> None:
    gone = [
        row.name
        for row in TABLE
        if row.of != ENVIRONMENT and row.name not in HAS and (not row.version or row.version == MINOR)
    ]
    assert not gone, (
        f"vLLM {vllm.__version__} has no {', '.join(gone)}: delete it, or mark the version that has it (@0.32)"
    )
    variables = [
        row.field
        for row in TABLE
        if row.of == ENVIRONMENT and row.kind == "identity" and row.field.startswith("VLLM_")
        if row.field not in vllm.envs.environment_variables and (not row.version or row.version == MINOR)
    ]
    assert not variables, f"vLLM {vllm.__version__} reads no {', '.join(variables)}: the fact is of no use any more"


def test_each_option_is_in_the_table_once() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    twice = [name for name in vllm.envs.environment_variables if len(row_of_variable(TABLE, name)) > 1]
    assert not twice, twice


def test_each_row_says_what_its_class_needs() -> None:
    for row in TABLE:
        assert row.kind in CLASSES, row.name
        assert bool(row.by) is (row.kind == "identity"), row.name
        assert bool(row.code) is (row.kind == "inert"), row.name
        assert bool(row.why) is (row.kind == "irrelevant"), row.name
        assert row.tests or row.kind != "served", row.name


def test_each_test_that_the_table_names_exists() -> None:
    for test in sorted({test for row in TABLE for test in row.tests}):
        file, _, function = test.partition("::")
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}, test


# --- what the rows say -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, Any]:
    """Every part of one engine's configuration by the name of its class, those included that are off by default."""
    found: dict[str, Any] = {}
    left = [config_of(folder, enable_lora=True)]
    while left:
        part = left.pop()
        found[type(part).__name__] = part
        for field in dataclasses.fields(part):
            if f"{type(part).__name__}.{field.name}" in HAS:
                continue  # no part of its own
            if getattr(part, field.name) is None:
                object.__setattr__(part, field.name, _off_by_default(type(part), field))
            left.append(getattr(part, field.name))
    return found


def _off_by_default(owner: type, field: dataclasses.Field[Any]) -> Any:
    (kind,) = parts_of(typing.get_type_hints(owner, vars(sys.modules[owner.__module__]))[field.name])
    return kind(**{"WatermarkConfig": {"key": 7}}.get(kind.__name__, {}))


def facts(config: Any) -> dict[str, str]:
    return model_facts(config) | layout_facts(config, pages()) | lora_facts(config.lora_config)


def other(value: Any) -> Any:
    """Another value of the same type, as far as that goes."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            return next(member for member in type(value) if member is not value)
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case None:
            return "other"
        case list() | tuple():
            return [*value, "other"]
        case set() | frozenset():
            return {*value, "other"}
        case dict():
            return {**value, "other": 1}
        case torch.dtype():
            return torch.float64 if value is not torch.float64 else torch.float32
    if dataclasses.is_dataclass(value):
        part, field = copy.copy(value), dataclasses.fields(value)[0].name
        object.__setattr__(part, field, other(getattr(part, field)))
        return part
    return object()


@contextmanager
def set_to(part: Any, field: str, value: Any) -> Iterator[None]:
    """Without vLLM's own checks: the same objects, one attribute further."""
    before = getattr(part, field)
    object.__setattr__(part, field, value)
    try:
        yield
    finally:
        object.__setattr__(part, field, before)


def settable(kind: str) -> list[Row]:
    return [row for row in TABLE if row.kind == kind and row.name in HAS and not row.tests]


@pytest.mark.parametrize("row", settable("identity"), ids=lambda row: row.name)
def test_what_is_identity_changes_its_fact(parts: dict[str, Any], row: Row) -> None:
    part = parts[row.of]
    before = facts(parts["VllmConfig"])
    value = other(getattr(part, row.field)) if row.value is None else row.value
    with set_to(part, row.field, value):
        assert row.by in changed(before, facts(parts["VllmConfig"]))
    assert facts(parts["VllmConfig"]) == before


@pytest.mark.parametrize("of", sorted({row.of for row in settable("irrelevant")}))
def test_what_is_irrelevant_changes_no_fact(parts: dict[str, Any], of: str) -> None:
    before = facts(parts["VllmConfig"])
    for row in settable("irrelevant"):
        if row.of == of:
            with set_to(parts[of], row.field, other(getattr(parts[of], row.field))):
                assert not changed(before, facts(parts["VllmConfig"])), row.name


@pytest.mark.parametrize("row", settable("inert"), ids=lambda row: row.name)
def test_what_is_inert_is_refused_with_its_code(folder: Path, row: Row) -> None:
    config = config_of(folder)
    assert unsupported(config, pages()) is None
    by_class = {type(part).__name__: part for part in (config, *vars(config).values())}
    with set_to(by_class[row.of], row.field, object() if row.value is None else row.value):
        refused = unsupported(config, pages())
        assert refused is not None and refused.code == row.code


VARIABLES = [row for row in TABLE if row.of == ENVIRONMENT and row.kind == "identity" and not row.tests]


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.field)
def test_variables_that_are_identity_change_their_fact(folder: Path, monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    config = config_of(folder)
    before = model_facts(config) | layout_facts(config, pages())
    monkeypatch.setenv(row.field, "1")
    assert changed(before, model_facts(config) | layout_facts(config, pages())) == {row.by}


def test_variables_that_are_irrelevant_change_no_fact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder)
    before = model_facts(config) | layout_facts(config, pages())
    for name in vllm.envs.environment_variables:
        (row,) = row_of_variable(TABLE, name)
        if row.kind in ("served", "irrelevant"):
            monkeypatch.setenv(name, "1")
    assert model_facts(config) | layout_facts(config, pages()) == before


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_ALLREDUCE_USE_FP8",
        "VLLM_DEEPEP_V3_FP8_COMBINE",
        "VLLM_DP_FP8_COMBINE",
        "VLLM_ENABLE_INDUCTOR_FAST_MATH",
        "VLLM_FLASHINFER_AUTOTUNE_FP4_ACCUMULATION",
        "VLLM_GPT_OSS_MXFP4_ACTIVATIONS",
        "VLLM_KIMI_K3_MXFP4_ACTIVATIONS",
        "VLLM_MARLIN_INPUT_FP4",
        "VLLM_MOE_FP8_COMBINE",
        "VLLM_NCCL_FP8_ALLREDUCE",
        "VLLM_TRITON_ATTN_FP8_QK",
        "VLLM_USE_DIRECT_DCP_FP8_GATHER",
        "VLLM_WEIGHT_OFFLOADING_FP8",
    ],
)
def test_a_variable_of_a_next_version_that_may_change_numerics_is_in_no_row(name: str) -> None:
    """These are invented: a pattern that fits one would call the real one irrelevant before anybody has read it."""
    assert not row_of_variable(TABLE, name)


def test_variables_that_are_facts_are_those_of_the_table() -> None:
    named = {row.field for row in TABLE if row.of == ENVIRONMENT and row.by.startswith("env.")}
    assert set(IN_IDENTITY) == named


# --- engines as users start them -------------------------------------------------------------


def pooled(**pooler: str) -> dict[str, Any]:
    return {"runner": "pooling", "pooler_config": pooler}


NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, None),
        ({"enable_prefix_caching": False}, None),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, None),
        ({"async_scheduling": False}, None),
        ({"data_parallel_size": 2}, None),
        ({"enable_lora": True}, None),
        ({"max_logprobs": -1, "enable_prompt_embeds": True}, None),
        *[({"load_format": name}, None) for name in ("safetensors", "pt", "dummy", "runai_streamer", "tensorizer")],
        ({"runner": "generate"}, None),
        ({"runner": "pooling"}, None),
        ({"convert": "embed"}, None),
        ({"runner": "pooling", "convert": "classify"}, None),
        (pooled(seq_pooling_type="LAST"), None),
        (pooled(tok_pooling_type="ALL"), None),
        (pooled(seq_pooling_type="MEAN"), "SW-712"),
        (pooled(seq_pooling_type="CLS"), "SW-712"),
        (pooled(tok_pooling_type="STEP"), "SW-712"),
        ({**pooled(seq_pooling_type="MEAN"), "enable_prefix_caching": True}, "SW-712"),
        ({"runner": "pooling", "hf_overrides": {"is_causal": False}}, "SW-712"),
        ({"speculative_config": NGRAMS}, None),
        ({"speculative_config": {**NGRAMS, "method": "ngram_gpu"}}, "SW-708"),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, "SW-712"),
    ],
    ids=str,
)
def test_engines_are_served_or_refused_as_the_table_says(
    folder: Path, arguments: dict[str, Any], code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = unsupported(config_of(folder, **arguments), pages())
    assert (None if refused is None else refused.code) == code


@pytest.mark.parametrize(
    ("pooler", "reason"),
    [
        ({"seq_pooling_type": "MEAN"}, "MEAN"),
        ({"seq_pooling_type": "CLS"}, "CLS"),
        ({"tok_pooling_type": "STEP"}, "STEP"),
        ({"seq_pooling_type": "MEAN", "tok_pooling_type": "STEP"}, "MEAN and STEP"),
    ],
    ids=str,
)
def test_a_kind_of_pooling_that_is_refused_is_named_alone(folder: Path, pooler: dict[str, str], reason: str) -> None:
    refused = unsupported(config_of(folder, **pooled(**pooler)), pages())
    assert refused is not None and refused.what == f"pooling by {reason} is not supported"
    assert "pool by LAST or ALL" in refused.fix


def test_a_pooling_model_whose_attention_is_the_reason_is_refused_for_no_kind_of_pooling(folder: Path) -> None:
    arguments = {**pooled(seq_pooling_type="MEAN"), "hf_overrides": {"is_causal": False}}
    refused = unsupported(config_of(folder, **arguments), pages())
    assert refused is not None and refused.what == "a model without prefix caching is not supported"


MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


def test_an_engine_that_returns_something_of_every_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends with an error where it is asked for the experts of a token that it has not computed itself."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # which that runner wants to run: this one does not
    moe = model_folder(tmp_path / "moe", **MIXTRAL, num_experts_per_tok=2)
    assert unsupported(config_of(moe), pages()) is None
    refused = unsupported(config_of(moe, enable_return_routed_experts=True), pages())
    assert refused is not None and refused.code == "SW-712"


def test_an_engine_that_takes_pictures_is_served(folder: Path) -> None:
    """As far as its configuration says; requests with a picture bypass."""
    config = config_of(folder)
    config.model_config.multimodal_config = MultiModalConfig(limit_per_prompt={"image": 4})
    assert unsupported(config, pages()) is None


MLA: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "head_dim": None,
}


@pytest.mark.parametrize(("amx", "gathers"), [(False, False), (False, True), (True, False)])
def test_mla_on_a_cpu_is_refused_where_vllm_cannot_go_on_behind_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx: bool, gathers: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("vllm.platforms.cpu.CpuPlatform.get_cpu_architecture", lambda *_: CpuArchEnum.X86)
    config = config_of(model_folder(tmp_path, **MLA), enable_prefix_caching=True)
    assert config.cache_config.enable_prefix_caching == amx, "vLLM switches it off"
    if not gathers:
        monkeypatch.delattr("vllm._custom_ops.gather_mla_context_cache_cpu")
    refused = unsupported(config, pages())
    assert (None if refused is None else refused.code) == (None if amx or gathers else "SW-712")


@pytest.mark.parametrize(("machine", "code"), [("riscv64", "SW-712"), ("x86_64", None)])
def test_a_cpu_that_vllm_computes_whole_prompts_on_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, machine: str, code: str | None
) -> None:
    config = config_of(folder, enable_prefix_caching=False)  # as vLLM decides by itself there
    monkeypatch.setattr("platform.machine", lambda: machine)
    refused = unsupported(config, pages())
    assert (None if refused is None else refused.code) == code


@pytest.mark.parametrize(
    ("backend", "code"), [(None, None), ("FLASH_ATTN", None), ("FLASHINFER", "SW-712"), ("TRITON_MLA", "SW-712")]
)
def test_backends_that_are_batch_invariant_for_whole_prompts_only_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str | None, code: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = config_of(folder)
    config.device_config.device_type = "cuda"
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    assert unsupported(config, pages()) is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    refused = unsupported(config, pages())
    assert (None if refused is None else refused.code) == code
