"""Real engines that embed: with stepwell the same vectors as without, whichever way hidden states are pooled.

vLLM computes prompts whole where it pools by MEAN or CLS, and a recalled prefix would end the engine: stepwell leaves
it alone. By LAST it recalls, but for requests that want a vector of each token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.demo.engine import ENVIRONMENT

from .wells import Well

TOKENS, WHOLE, PAGE = 530, 512, 128
LIMIT_S = 300.0


def embed(model: Path, texts: list[list[int]], log: Path, pooling: str, connector: dict[str, Any] | None) -> Any:
    arguments = {
        "model": str(model),
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"seq_pooling_type": pooling},
        "dtype": "float32",
        "block_size": PAGE,
        "num_gpu_blocks_override": 13,
        "max_model_len": 1024,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_transfer_config": connector,
    }
    script = str(Path(__file__).with_name("embedder.py"))
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, script, json.dumps(arguments), json.dumps(texts)],
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    lines = log.read_text(errors="replace").splitlines()
    assert done.returncode == 0, "\n".join(lines[-40:])
    return next(json.loads(line)["rounds"] for line in reversed(lines) if line.startswith("{"))


def difference(one: Any, other: Any) -> float:
    """The largest between two numbers at the same place."""
    if isinstance(one, list):
        assert len(one) == len(other)
        return max(map(difference, one, other), default=0.0)
    return float(abs(one - other))


@pytest.mark.parametrize("pooling", ["MEAN", pytest.param("CLS", marks=pytest.mark.nightly)])
def test_an_engine_that_needs_its_prompts_whole_is_left_alone(
    model: Path, folder: Path, well: Well, texts: list[list[int]], pooling: str
) -> None:
    prompts = [text[:TOKENS] for text in texts[:2]]
    alone = embed(model, prompts, folder / f"{pooling}-alone.log", pooling, None)
    log = folder / f"{pooling}.log"
    beside = embed(model, prompts, log, pooling, well.connector())
    assert beside == alone, "to the last bit: nothing is different"
    assert log.read_text(errors="replace").count("SW-712") == 1
    print(f"{pooling}: 3 x 2 texts, vectors are equal bit by bit; one line with SW-712")


def test_what_is_pooled_by_the_last_token_is_recalled(
    model: Path, folder: Path, well: Well, texts: list[list[int]]
) -> None:
    """In float32 a recall differs from a cold run by rounding alone. Token by token nothing is recalled: each one's
    hidden state is wanted."""
    prompts = [text[:TOKENS] for text in texts[:2]]
    alone = embed(model, prompts, folder / "LAST-alone.log", "LAST", None)
    beside = embed(model, prompts, folder / "LAST.log", "LAST", well.connector())
    recalled = 0
    for number, (one, other) in enumerate(zip(alone, beside, strict=True)):
        for task in ("embed", "token_embed"):
            cached = [answer["cached"] for answer in other[task]]
            by = difference([a["vectors"] for a in one[task]], [a["vectors"] for a in other[task]])
            print(f"LAST, {task}, round {number + 1}: cached {cached}, vectors differ by at most {by:.1e}")
            assert by < 1e-4
            assert all(len(a["vectors"]) == TOKENS for a in other[task]) or task == "embed"
            assert set(cached) <= ({0, WHOLE} if task == "embed" else {0})  # a busy machine may leave one out
            recalled += sum(cached)
    assert recalled >= 2 * WHOLE
