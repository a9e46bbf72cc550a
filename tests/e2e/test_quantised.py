"""Eight bits for KV, weights and activations, by the real engine: a recall is exactly what the engine's own hit of the
same length is, and engines that differ in the format of KV, in a scale, or in a weight share nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from lab.rig.tiny import KINDS, write_model
from stepwell.demo.engine import EngineProcess

from .test_groups import ask, assert_recalled, prompt
from .wells import Well, config, eventually, in_one_process, start

BLOCK, CONTEXT = 64, 512
EIGHT = {"num_bits": 8, "symmetric": True}
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": EIGHT | {"type": "float", "strategy": "tensor", "dynamic": False},
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": EIGHT | {"type": "int", "strategy": "channel", "dynamic": False},
            "input_activations": EIGHT | {"type": "int", "strategy": "token", "dynamic": True},
        }
    },
}


def engine(folder: Path, well: Well, model: Path, name: str, **extra: Any) -> EngineProcess:
    connector = well.connector(canary=0, block_tokens=BLOCK)
    extra |= {"skip_tokenizer_init": True}
    settings = config(model, connector, page=BLOCK, pool_pages=400, max_model_len=CONTEXT, extra=extra)
    return start(in_one_process(settings), folder, name)


def new_then_recalled(engine: EngineProcess) -> list[list[float | None] | None]:
    """Asks what this engine has never stored: of each, nothing is found, and then a recall is the engine's own hit."""
    found = []
    for tokens in (BLOCK + 1, 181, 400):
        cold, hit = ask(engine, prompt(tokens)), ask(engine, prompt(tokens))
        assert (cold.local_tokens, cold.external_tokens) == (0, 0)
        assert (hit.local_tokens, hit.external_tokens) == ((tokens - 1) // BLOCK * BLOCK, 0)
        assert_recalled(engine, prompt(tokens), hit)
        found.append(hit.logprobs)
    return found


def write_quantised(folder: Path, plain: Path, k_scale: float = 0.5, shift: int = 0) -> Path:
    """The plain model with int8 weights and a scale for each row, and FP8 KV. `shift`: added to one of its weights."""
    weights = load_file(plain / "model.safetensors")
    for name in [name for name in weights if ".layers." in name and weights[name].dim() == 2]:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] += shift
    for layer in range(3):
        for kind, value in (("k", k_scale), ("v", 0.25)):
            weights[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([value])
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(KINDS["llama"] | {"quantization_config": QUANTISED}))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama"])
def test_scales_and_weights_of_a_quantised_model_are_identity(
    kind: str, folder: Path, well: Well, tmp_path: Path
) -> None:
    plain = write_model(KINDS[kind], tmp_path / "plain")
    models = {
        "quantised": write_quantised(tmp_path / "a", plain),
        "another scale": write_quantised(tmp_path / "b", plain, k_scale=0.375),
        "another weight": write_quantised(tmp_path / "c", plain, shift=1),
    }
    answers = []
    for name, model in models.items():
        with engine(folder, well, model, name) as one:
            answers.append(new_then_recalled(one))
    assert answers[0] != answers[1], "the scale of keys has been read, and they were other keys"
    with engine(folder, well, models["quantised"], "KV of 16 bits", kv_cache_dtype="bfloat16") as one:
        new_then_recalled(one)
    eventually(well.is_alone, "no engine is left")


@pytest.mark.nightly
@pytest.mark.skipif(
    not hasattr(base, "KVConnectorTransferResults"), reason="models of several groups are not served with this vLLM"
)
def test_windows_of_eight_bits(folder: Path, well: Well, tmp_path: Path) -> None:
    model = write_model(KINDS["gemma3"], tmp_path / "gemma3")
    for kind in ("fp8_e4m3", "fp8_e5m2", "auto"):
        with engine(folder, well, model, f"windows, {kind}", kv_cache_dtype=kind) as one:
            new_then_recalled(one)
    eventually(well.is_alone, "no engine is left")
