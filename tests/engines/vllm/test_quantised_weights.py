"""Quantised checkpoints by their files: the fingerprint covers each byte of them, scales and recipes too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import gguf
import numpy as np
from safetensors.numpy import save_file

from stepwell.block.facts import digest_of
from stepwell.client.fingerprint import fingerprint
from stepwell.engines.common.weights import WeightFiles
from stepwell.engines.vllm.identity.facts import model_facts
from stepwell.engines.vllm.identity.weights import weight_files

from .test_identity import config_of, model_folder

IN, OUT, GROUP = 64, 64, 32
SCALES = np.linspace(0.01, 0.02, IN // GROUP * OUT, dtype=np.float16).reshape(IN // GROUP, OUT)
RECIPES = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


def quantised(folder: Path, method: str) -> Path:
    """The path that vLLM is given: a folder with its recipe, or one file."""
    model_folder(folder, **({"quantization_config": RECIPES[method]} if method in RECIPES else {}))
    dice = np.random.default_rng(0)
    if method == "gguf":
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        matrix = dice.standard_normal((OUT, IN), dtype=np.float32)
        writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return folder / "model.gguf"
    packed = (IN, OUT // 8) if method == "awq" else (IN // 8, OUT)
    tensors = {"qweight": dice.integers(0, 1 << 31, packed, np.int32), "scales": SCALES}
    tensors["qzeros"] = dice.integers(0, 1 << 31, (IN // GROUP, OUT // 8), np.int32)
    save_file(
        {f"model.layers.0.self_attn.q_proj.{name}": value for name, value in tensors.items()}, folder / "a.safetensors"
    )
    (folder / "quantize_config.json").write_text(json.dumps(RECIPES[method]))
    return folder


def identity(folder: Path, model: Path) -> tuple[bytes, bytes]:
    config = config_of(folder)
    facts = digest_of(model_facts(config))
    config.model_config.model = str(model)
    files = weight_files(config)
    assert isinstance(files, WeightFiles), files
    return facts, fingerprint(files.paths, None)


@pytest.mark.parametrize("method", ["awq", "gptq", "gguf"])
def test_one_byte_of_a_scale_makes_other_weights(tmp_path: Path, method: str) -> None:
    model = quantised(tmp_path / "a", method)
    before = identity(tmp_path / "a", model)
    weights = next(path for path in (tmp_path / "a").iterdir() if path.suffix in (".safetensors", ".gguf"))
    content = bytearray(weights.read_bytes())
    # A block of Q8_0 begins with its scale, and GGUF's tensors are the end of the file.
    at = len(content) - OUT * IN // 32 * 34 if method == "gguf" else content.index(SCALES.tobytes())
    content[at] ^= 1
    weights.write_bytes(content)
    after = identity(tmp_path / "a", model)
    assert before[0] == after[0] and before[1] != after[1]


def test_another_quantisation_of_a_model_is_another_model(tmp_path: Path) -> None:
    found = [identity(tmp_path / method, quantised(tmp_path / method, method)) for method in ("awq", "gptq")]
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_a_recipe_beside_the_weights_counts(tmp_path: Path) -> None:
    model = quantised(tmp_path / "a", "gptq")
    before = identity(model, model)
    (model / "quantize_config.json").write_text(json.dumps(RECIPES["gptq"] | {"group_size": 64}))
    assert identity(model, model)[1] != before[1]
