"""Answers do not depend on where KV came from: computed, the engine's own cache, or recalled from the well.

In float32, where a cold run and a prefix hit must give the same tokens. A block is four of the engine's pages here, so
engine and well do not agree about where a prefix ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo.engine import Engine
from stepwell.demo.wire import Answer, Question

from .wells import Well, config, eventually, forget, receipt, start, warm_up

PAGE, BLOCK = 32, 128
PROMPT = 620  # four blocks and a part; with 32 tokens of answer, five blocks and a part
POOL = 44
LOGPROBS = {"logprobs": 0}


@pytest.fixture(scope="module")
def prompts(texts: list[list[int]]) -> list[list[int]]:
    return [text[:PROMPT] for text in texts[:5]]


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path, well: Well) -> Iterator[Engine]:
    settings = config(
        model, well.connector(block_tokens=BLOCK), dtype="float32", page=PAGE, pool_pages=POOL, max_model_len=1376
    )
    with start(settings, folder, "engine") as engine:
        warm_up(engine, BLOCK)
        yield engine


@pytest.fixture(scope="module")
def cold(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """The first answers. Each prompt is asked about again at once, for the log-probabilities of an engine hit."""
    return [engine.ask(prompt, 32, **LOGPROBS) for prompt in prompts]


@pytest.fixture(scope="module")
def hits(engine: Engine, prompts: list[list[int]], cold: list[Answer]) -> list[Answer]:
    hits = []
    for prompt in prompts:
        assert engine.ask(prompt, 1).external_tokens is not None
        hits.append(engine.ask(prompt, 32, **LOGPROBS))
    return hits


def test_a_cold_engine_recalls_nothing(cold: list[Answer]) -> None:
    assert [(answer.local_tokens, answer.external_tokens) for answer in cold] == [(0, 0)] * len(cold)
    assert [receipt(answer)["recalled_tokens"] for answer in cold] == [0] * len(cold)


def test_recalled_is_equal_to_computed_and_to_an_engine_hit(
    engine: Engine, well: Well, prompts: list[list[int]], cold: list[Answer], hits: list[Answer]
) -> None:
    for prompt, first, hit in zip(prompts, cold, hits, strict=True):
        forget(engine)
        recalled = engine.ask(prompt, 32, **LOGPROBS)
        print(f"ttft cold {first.ttft_s:.3f} hit {hit.ttft_s:.3f} recalled {recalled.ttft_s:.3f} {receipt(recalled)}")
        assert (hit.local_tokens, hit.external_tokens) == (608, 0)
        assert (recalled.local_tokens, recalled.external_tokens) == (0, 512)
        assert receipt(recalled)["tiers"] == {"host": 512}
        assert recalled.token_ids == first.token_ids == hit.token_ids
    eventually(well.is_idle, "nothing is held")
