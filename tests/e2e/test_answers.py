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
PROMPT, WHOLE = 530, 512  # tokens, and those of them that a hit can have, in pages as well as in blocks
POOL = 44  # pages; a request takes 18
LOGPROBS = {"logprobs": 0}


@pytest.fixture(scope="module")
def prompts(texts: list[list[int]]) -> list[list[int]]:
    return [text[:PROMPT] for text in texts[:4]]


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
    return [engine.ask(prompt, 32, **LOGPROBS) for prompt in prompts]


def test_a_cold_engine_recalls_nothing(cold: list[Answer]) -> None:
    assert [(answer.local_tokens, answer.external_tokens) for answer in cold] == [(0, 0)] * len(cold)
    assert [receipt(answer)["recalled_tokens"] for answer in cold] == [0] * len(cold)


def test_what_was_pushed_out_is_recalled_and_equal_to_an_engine_hit(
    engine: Engine, well: Well, prompts: list[list[int]], cold: list[Answer]
) -> None:
    for prompt, first in zip(prompts, cold, strict=True):  # the others have pushed it out by now
        recalled, hit = engine.ask(prompt, 32, **LOGPROBS), engine.ask(prompt, 32, **LOGPROBS)
        print(f"ttft cold {first.ttft_s:.3f} recalled {recalled.ttft_s:.3f} hit {hit.ttft_s:.3f} s")
        assert (recalled.local_tokens, recalled.external_tokens) == (0, WHOLE)
        assert (hit.local_tokens, hit.external_tokens) == (WHOLE, 0)
        assert recalled.cached_tokens == hit.cached_tokens == WHOLE
        assert receipt(recalled)["tiers"] == {"host": WHOLE}
        assert recalled.token_ids == hit.token_ids == first.token_ids
        assert recalled.logprobs == hit.logprobs
    eventually(well.is_idle, "nothing is held")


def test_a_recall_goes_on_inside_a_block_where_an_engine_hit_ends(
    engine: Engine, texts: list[list[int]], prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    engine.ask(prompts[0], 32)
    engine.ask([*texts[5], *texts[6][:260]], 1)  # 31 pages: takes the last 5 of the 18 from the one before
    answer = engine.ask(prompts[0], 32)
    local, recalled = answer.local_tokens, answer.external_tokens
    assert local is not None and recalled is not None
    assert local + recalled == WHOLE
    assert local % BLOCK != 0 and recalled > 0
    assert answer.token_ids == cold[0].token_ids


def test_generated_tokens_are_spilled_too(engine: Engine, texts: list[list[int]]) -> None:
    question = texts[4][:120]
    answered = engine.ask(question, 32)
    forget(engine)
    again = engine.ask([*question, *answered.token_ids[:20]], 12)
    assert (again.local_tokens, again.external_tokens) == (0, BLOCK)
    assert again.token_ids == answered.token_ids[20:]


def test_requests_at_the_same_time_are_answered_alike(
    engine: Engine, well: Well, prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    together = engine.ask_all([Question(prompt, 32) for prompt in prompts])
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in cold]
    assert all(receipt(answer)["recalled_tokens"] >= WHOLE for answer in together)
    eventually(well.is_idle, "nothing is held")


def test_salts_share_nothing(engine: Engine, prompts: list[list[int]], cold: list[Answer]) -> None:
    def ask(salt: str) -> Answer:
        forget(engine)
        return engine.ask_all([Question(prompts[0], 32, salt=salt)])[0]

    assert ask("one").external_tokens == 0
    recalled = ask("one")
    assert recalled.external_tokens == WHOLE
    other = ask("two")
    assert (other.local_tokens, other.external_tokens) == (0, 0)
    assert recalled.token_ids == other.token_ids == cold[0].token_ids


def test_after_a_reset_of_the_connector_nothing_of_before_is_recalled(
    engine: Engine, prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    assert engine.ask(prompts[0], 1).external_tokens == WHOLE
    forget(engine, connector=True)
    fresh = engine.ask(prompts[0], 32)
    assert (fresh.local_tokens, fresh.external_tokens) == (0, 0)
    assert fresh.token_ids == cold[0].token_ids
    forget(engine)
    assert engine.ask(prompts[0], 1).external_tokens == WHOLE
