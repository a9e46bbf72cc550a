"""Speculative decoding below vLLM's offloading: chunks hold KV of final tokens, the model's and a drafter's."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from stepwell.engines.vllm.offloading.opening import unsupported

from .local import open_well, prompt
from .test_identity import config_of, model_folder
from .test_tier import engine, external, settle

DRAFTERS = ["ngram", "draft_model", "eagle"]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_engine_that_starts_again_finds_what_was_accepted(tmp_path: Path, drafter: str) -> None:
    fields: dict[str, Any] = {"drafts": 3, "drafter": drafter, "rows": 160}
    with open_well() as well:
        with engine(tmp_path, well, **fields) as harness:
            first = harness.serve(prompt(150), max_tokens=90)
            settle(harness)
        with engine(tmp_path, well, **fields) as harness:
            turn = [*first.prompt, *first.tokens, *prompt(20, seed=2)]
            assert external(harness, turn) >= (240 - 1 - 3) // 16 * 16 - 16


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_and_go(tmp_path: Path, seed: int) -> None:
    """None is preempted: what vLLM's offloading does then is not what is tried here."""
    dice = random.Random(seed)
    fields: dict[str, Any] = {
        "drafts": dice.randrange(1, 5),
        "drafter": DRAFTERS[seed % 3],
        "async_scheduling": seed % 3 > 0 and dice.random() < 0.5,
        "runner_v2": dice.random() < 0.5,
        "num_pages": 81,
        "batch_tokens": dice.choice([64, 256]),
    }
    with open_well() as well, engine(tmp_path, well, rows=160, max_model_len=500, max_seqs=6, **fields) as harness:
        prompts = [prompt(dice.randrange(40, 200), seed=n) for n in range(6)]
        for _ in range(30):
            harness.add(dice.choice(prompts), max_tokens=dice.randrange(1, 80))
            for _ in range(dice.randrange(8)):
                harness.step()
        harness.run()
        settle(harness)
        assert sum(external(harness, each) for each in prompts) > 0


@pytest.mark.parametrize("method", ["medusa", "dflash", "another"])
def test_other_drafters_leave_it_inert(tmp_path: Path, method: str) -> None:
    config = config_of(model_folder(tmp_path / "model"))
    assert unsupported(config) is None
    config.speculative_config = SimpleNamespace(method=method)
    refused = unsupported(config)
    assert refused is not None and refused.code == "SW-708"
