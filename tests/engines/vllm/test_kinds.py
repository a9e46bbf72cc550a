"""What the table of model families (kinds.toml) says is what the connector does, and what tests show."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("vllm", reason="needs vLLM")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.model_executor.models import ModelRegistry
from vllm.v1 import kv_cache_interface

from lab.rig.tiny import KINDS
from stepwell.engines.vllm.identity.unsupported import unsupported

from .test_identity import config_of, model_folder, pages

TESTS = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text())["row"]
FAMILIES = {row["family"]: row for row in ROWS}
ATTENTION = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FIELDS: dict[str, dict[str, Any]] = {
    "MLAAttentionSpec": ATTENTION | {"num_kv_heads": 1},
    "SlidingWindowSpec": ATTENTION | {"sliding_window": 64},
    "SlidingWindowMLASpec": ATTENTION | {"num_kv_heads": 1, "sliding_window": 64},
    "ChunkedLocalAttentionSpec": ATTENTION | {"attention_chunk_size": 256},
    "MambaSpec": {"block_size": 128, "shapes": ((4, 64),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"},
}


@pytest.mark.skipif(not hasattr(base, "KVConnectorTransferResults"), reason="this vLLM serves one group only")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_or_left_alone_as_the_table_says(tmp_path: Path, family: str) -> None:
    row = FAMILIES[family]
    specs = [getattr(kv_cache_interface, name)(**FIELDS.get(name, ATTENTION)) for name in row["specs"].split()]
    config = config_of(model_folder(tmp_path / "model"))
    config.cache_config.mamba_cache_mode = "align"  # as vLLM sets it for models with states
    refused = unsupported(config, pages(*specs))
    assert (refused.code if refused is not None else "") == row.get("code", "")


def test_vllm_has_these_architectures() -> None:
    named = {name for row in ROWS for name in row["architectures"].split()}
    assert named <= set(ModelRegistry.get_supported_archs())


def test_what_is_served_names_its_tests_or_the_family_that_has_them() -> None:
    for row in ROWS:
        if "alike" in row:
            assert FAMILIES[row["alike"]]["tests"] and FAMILIES[row["alike"]]["specs"] == row["specs"], row["family"]
        assert not ("tests" in row and "code" in row), row["family"]


def test_each_test_that_the_table_names_exists() -> None:
    kinds = set()
    for node in (node for row in ROWS for node in row.get("tests", [])):
        file, _, function = node.partition("::")
        function, _, kind = function.rstrip("]").partition("[")
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert function in {part.name for part in body if isinstance(part, ast.FunctionDef)}, node
        kinds.add(kind)
    assert set(KINDS) - kinds == {"olmo3 without windows"}, "each tiny model is named, but that of the trust run"
