"""The examples do what they say, with a tiny model in place of a real one."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from stepwell.longctx import attach, policies
from tests.longctx.models import CONFIGS, make, tokens
from tests.longctx.tiny_text import VOCABULARY, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = EXAMPLES / "longctx_own_policy"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": VOCABULARY, "eos_token_id": None})
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def program(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_long_context_and_a_small_hot_budget(model_folder, capsys):
    options = ["--model", str(model_folder), "--tokens", "3000", "--hot", "500", "--new", "5", "--host", "256KiB"]
    program("longctx_32k").main(options)
    said = capsys.readouterr().out
    ledger, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    assert "3,000 tokens, 5 generated" in said
    token = 2 * 2 * 2 * 16 * 4
    assert 0 < ledger["hot_bytes"] <= (500 + 70) * token  # room in the tail counts, too
    assert 0 < ledger["host_bytes"] <= 256 << 10 and ledger["disk_bytes"] > 0 and ledger["bytes_cold_to_hot"] > 0


def test_a_saved_context_needs_no_prefill(model_folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("STEPWELL_HOME", str(tmp_path / "home"))
    file = tmp_path / "context.swc"
    program("longctx_saved").main(
        ["--model", str(model_folder), "--tokens", "1500", "--hot", "400", "--file", str(file)]
    )
    first, second = capfd.readouterr().out.split("Another process:")
    assert "0 of them in the cache" in first and f"saved as {file}" in first
    computed = [int(re.search(r"computed ([\d,]+) tokens", said)[1].replace(",", "")) for said in (first, second)]
    assert "opened 1,5" in second and computed[0] > 1500 and computed[1] < 60


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The entry point as its pyproject declares it, as if it were installed."""
    declared = tomllib.loads((OWN / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "stepwell_neighbours-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in declared["entry-points"][policies.GROUP].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{policies.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_policy_of_ones_own_is_found_by_name_and_runs(installed):
    model, ids = make(), tokens(600)
    with attach(model, "neighbours", hot_tokens=200) as attached:
        model.generate(ids, max_new_tokens=8, do_sample=False)
        told = attached.ledger.snapshot()
    assert told["layer_steps"] > 0 and told["bytes_cold_to_hot"] > 0


def test_it_takes_the_neighbours_along(installed):
    selector = policies.named("neighbours").selector
    from stepwell.longctx.parts.select.base import Candidates

    score = torch.tensor([[0.0, 0.9, 0.0, 0.5, 0.4, 0.3, 0.0, 0.0, 0.2]])
    none = torch.zeros(1, 1, 1)
    shown = Candidates(score[:, None, None], none, score, tokens=9 * 16 * 4 // 4, page_tokens=16)
    chosen = type(selector)(share=4 / 9, leading=0.25).select(shown)
    assert chosen.pages[0, chosen.valid[0]].tolist() == [0, 1, 2, 3]  # by score alone: 1, 3, 4, 5
