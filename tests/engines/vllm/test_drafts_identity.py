"""Which drafters are served, and what of them is part of an engine's identity, by vLLM's own configs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
pytest.importorskip("vllm", reason="needs vLLM")

from lab.rig.well import until
from stepwell.block.facts import digest_of
from stepwell.block.groups import GroupKind, GroupRule
from stepwell.client.fingerprint import fingerprint
from stepwell.engines.common.weights import NoWeightFiles, WeightFiles, WeightsIdentity, together
from stepwell.engines.vllm.identity.drafts import drafted_layers, recomputed_tokens
from stepwell.engines.vllm.identity.facts import model_facts
from stepwell.engines.vllm.identity.unsupported import unsupported
from stepwell.engines.vllm.identity.weights import weight_files

from .test_identity import LLAMA, config_of, model_folder, pages

EAGLE = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 512}
FULL = (GroupRule(GroupKind.FULL, 128),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = model_folder(tmp_path / "head", **EAGLE)
    (folder / "model.safetensors").write_bytes(b"a drafter's")
    return folder


def drafting(model: Path, head: Path, method: str = "eagle", **more: Any) -> Any:
    return config_of(
        model, speculative_config={"method": method, "model": str(head), "num_speculative_tokens": 3} | more
    )


def digest(config: Any) -> str:
    return digest_of(model_facts(config)).hex()


def weights(config: Any) -> bytes:
    files = weight_files(config)
    assert isinstance(files, WeightFiles)
    return together(*(fingerprint(paths, None) for paths in (files.paths, files.drafter) if paths))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_drafters_with_kv_of_their_own_are_served(model: Path, tmp_path: Path, method: str) -> None:
    config = drafting(model, model_folder(tmp_path / "head", **(EAGLE3 if method == "eagle3" else EAGLE)), method)
    assert unsupported(config, pages()) is None
    again = 0 if method == "draft_model" else 128
    assert recomputed_tokens(config, FULL) == again
    assert recomputed_tokens(config, (*FULL, GroupRule(GroupKind.WINDOW, 256, 64))) == 2 * again


def test_as_much_is_computed_again_as_the_engine_does(model: Path, head: Path) -> None:
    if "disable_eagle_block_drop" in {f.name for f in dataclasses.fields(drafting(model, head).speculative_config)}:
        assert recomputed_tokens(drafting(model, head, disable_eagle_block_drop=True), FULL) == 0
    drafts = SimpleNamespace(method="mtp", use_eagle=lambda: True)
    ahead = SimpleNamespace(speculative_config=drafts, num_prefill_lookahead_tokens=200)
    assert recomputed_tokens(ahead, FULL) == 256, "modules that look farther ahead than a page"
    assert recomputed_tokens(config_of(model), FULL) == 0


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "dflash", "extract_hidden_states", "another", None])
def test_others_are_left_alone(model: Path, method: str | None) -> None:
    config = config_of(model)
    config.speculative_config = SimpleNamespace(method=method)
    refused = unsupported(config, pages())
    assert refused is not None and refused.code == "SW-708" and str(method) in refused.what


def test_stages_that_differ_are_left_alone(model: Path, head: Path) -> None:
    config = drafting(model, head)
    config.parallel_config.pipeline_parallel_size = 2
    refused = unsupported(config, pages())
    assert refused is not None and refused.code == "SW-708" and "pipeline_parallel_size=2" in refused.what


def test_the_drafter_is_part_of_the_identity(model: Path, head: Path, tmp_path: Path) -> None:
    plain, with_head = config_of(model), drafting(model, head)
    narrow = model_folder(tmp_path / "narrow", **EAGLE, intermediate_size=128)
    others = {
        "none": digest(plain),
        "eagle": digest(with_head),
        "another method": digest(drafting(model, model_folder(tmp_path / "third", **EAGLE3), "eagle3")),
        "another config": digest(drafting(model, narrow)),
        "in another precision": digest(drafting(model, head, quantization="fp8")),
        "loaded otherwise": digest(drafting(model, head, draft_load_config={"load_format": "dummy"})),
    }
    assert len(set(others.values())) == len(others), others
    assert others["eagle"] == digest(drafting(model, head, num_speculative_tokens=5)), "how many does not matter"
    moved = model_folder(tmp_path / "elsewhere" / "head", **EAGLE)
    assert others["eagle"] == digest(drafting(model, moved)), "nor where it lies"
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert others["none"] == digest(config_of(model, speculative_config=ngram)), "one without KV is none of it"


def test_its_weights_are_fingerprinted_with_the_models(model: Path, head: Path) -> None:
    plain, before = weights(config_of(model)), weights(drafting(model, head))
    assert plain != before == weights(drafting(model, head))
    (head / "model.safetensors").write_bytes(b"another's...")
    assert before != weights(drafting(model, head))
    (head / "model.safetensors").unlink()
    files = weight_files(drafting(model, head))
    assert isinstance(files, NoWeightFiles) and "drafter" in files.reason
    dummy = weight_files(drafting(model, head, draft_load_config={"load_format": "dummy"}))
    assert isinstance(dummy, NoWeightFiles) and "dummy" in dummy.reason


def test_two_models_that_draft_for_each_other_are_told_apart(tmp_path: Path) -> None:
    """Two of one architecture, as a model and another tuning of it: all that differs is which one answers."""
    folders = [model_folder(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        (folder / "model.safetensors").write_bytes(folder.name.encode())
    one, other = (drafting(*pair, "draft_model") for pair in (folders, folders[::-1]))
    assert digest(one) == digest(other)
    assert weights(one) != weights(other)
    identities = [
        WeightsIdentity(None, lambda config=config: weight_files(config), tmp_path / "c") for config in (one, other)
    ]
    try:
        assert until(lambda: all(identity() is not None for identity in identities))
        assert [identity() for identity in identities] == [weights(one), weights(other)]
    finally:
        for identity in identities:
            identity.close()


def test_a_drafter_within_the_model_has_its_weights_there(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    config = config_of(model)
    config.speculative_config = SimpleNamespace(method="mtp", draft_model_config=config.model_config)
    assert weights(config) == weights(config_of(model))


def test_a_drafters_layers_are_told_by_their_names(model: Path, head: Path) -> None:
    own = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
    names = [*own, "model.layers.2.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"]
    assert drafted_layers(drafting(model, head), names) == set(names[2:])
    assert drafted_layers(config_of(model), names) == set()
