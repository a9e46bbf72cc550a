"""Answers do not depend on where KV came from: computed, the engine's own cache, or recalled from the well.

In float32, where a cold run and a prefix hit must give the same tokens. A block is four of the engine's pages here, so
engine and well do not agree about where a prefix ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, recalled, recalled_all, receipt, start, warm_up

PAGE, BLOCK = 32, 128
PROMPT, WHOLE = 530, 512  # tokens, and those of them that a hit can have, in pages as well as in blocks
POOL = 44  # pages; a request takes 18
LOGPROBS = {"logprobs": 0}


@pytest.fixture(scope="module")
def prompts(texts: list[list[int]]) -> list[list[int]]:
    return [text[:PROMPT] for text in texts[:4]]


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path, well: Well) -> Iterator[EngineProcess]:
    settings = config(
        model, well.connector(block_tokens=BLOCK), dtype="float32", page=PAGE, pool_pages=POOL, max_model_len=1376
    )
    with start(settings, folder, "engine") as engine:
        warm_up(engine, BLOCK)
        yield engine


@pytest.fixture(scope="module")
def cold(engine: EngineProcess, prompts: list[list[int]]) -> list[Answer]:
    return [engine.ask(prompt, 32, **LOGPROBS) for prompt in prompts]


def test_a_cold_engine_recalls_nothing(cold: list[Answer]) -> None:
    assert [(answer.local_tokens, answer.external_tokens) for answer in cold] == [(0, 0)] * len(cold)
    assert [receipt(answer)["recalled_tokens"] for answer in cold] == [0] * len(cold)


def test_what_was_pushed_out_is_recalled_and_equal_to_an_engine_hit(
    engine: EngineProcess, well: Well, prompts: list[list[int]], cold: list[Answer]
) -> None:
    for prompt, first in zip(prompts, cold, strict=True):  # the others have pushed it out by now
        again, hit = recalled(engine, prompt, **LOGPROBS), engine.ask(prompt, 32, **LOGPROBS)
        print(f"ttft cold {first.ttft_s:.3f} recalled {again.ttft_s:.3f} hit {hit.ttft_s:.3f} s")
        assert (again.local_tokens, again.external_tokens) == (0, WHOLE)
        assert (hit.local_tokens, hit.external_tokens) == (WHOLE, 0)
        assert again.cached_tokens == hit.cached_tokens == WHOLE
        assert receipt(again)["tiers"] == {"host": WHOLE}
        assert again.token_ids == hit.token_ids == first.token_ids
        assert again.logprobs == hit.logprobs
    eventually(well.is_idle, "nothing is held")


def test_a_recall_goes_on_inside_a_block_where_an_engine_hit_ends(
    engine: EngineProcess, texts: list[list[int]], prompts: list[list[int]], cold: list[Answer]
) -> None:
    for _ in range(RECALL_ATTEMPTS):
        forget(engine)
        engine.ask(prompts[0], 32)
        engine.ask([*texts[5], *texts[6][:260]], 1)  # 31 pages: takes the last 5 of the 18 from the one before
        answer = engine.ask(prompts[0], 32)
        if answer.external_tokens and answer.cached_tokens == WHOLE:
            break
    assert answer.local_tokens is not None and answer.external_tokens is not None
    assert answer.local_tokens + answer.external_tokens == WHOLE
    assert answer.local_tokens % BLOCK != 0 and answer.external_tokens > 0
    assert answer.token_ids == cold[0].token_ids


def test_generated_tokens_are_spilled_too(engine: EngineProcess, texts: list[list[int]]) -> None:
    question = texts[4][:120]
    answered = engine.ask(question, 32)
    forget(engine)
    again = recalled(engine, [*question, *answered.token_ids[:20]], 12)
    assert (again.local_tokens, again.external_tokens) == (0, BLOCK)
    assert again.token_ids == answered.token_ids[20:]


def test_requests_at_the_same_time_are_answered_alike(
    engine: EngineProcess, well: Well, prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    together = recalled_all(engine, [Question(prompt, 32) for prompt in prompts])
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in cold]
    assert all(receipt(answer)["recalled_tokens"] >= WHOLE for answer in together)
    eventually(well.is_idle, "nothing is held")


def test_a_pause_switches_recalls_off_at_once_and_resuming_brings_them_back(
    engine: EngineProcess, well: Well, folder: Path, prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    recalled(engine, prompts[0])
    for _ in range(2):  # so that each change is told anew
        missed, refused = (int(well.stats().get(name, 0)) for name in ("misses_paused", "spills_refused_paused"))
        control.pause(well.home, ["recalls", "spills"], "a test")
        forget(engine)
        computed = engine.ask(prompts[0], 32)
        assert (computed.local_tokens, computed.external_tokens) == (0, 0)
        assert computed.token_ids == cold[0].token_ids
        assert well.stats()["misses_paused"] > missed, "it was answered, and not left to wait"
        eventually(lambda: well.stats().get("spills_refused_paused", 0) > refused, "its spill was refused")  # noqa: B023
        control.resume(well.home, ["recalls", "spills"])
        forget(engine)
        again = recalled(engine, prompts[0])
        assert again.external_tokens == WHOLE and again.token_ids == cold[0].token_ids
    log = (folder / "engine.log").read_text()
    assert log.count("the well's operator has paused recalls") == log.count("recalls are resumed") == 2


def test_salts_share_nothing(engine: EngineProcess, prompts: list[list[int]], cold: list[Answer]) -> None:
    one, two = [Question(prompts[0], 32, salt="one")], [Question(prompts[0], 32, salt="two")]
    forget(engine)
    first = engine.ask_all(one)[0]
    second = engine.ask_all(two)[0]
    assert (first.local_tokens, first.external_tokens) == (second.local_tokens, second.external_tokens) == (0, 0)
    forget(engine)
    again = recalled_all(engine, one)[0]
    assert (again.local_tokens, again.external_tokens) == (0, WHOLE)
    assert first.token_ids == second.token_ids == again.token_ids == cold[0].token_ids


def test_after_a_reset_of_the_connector_nothing_of_before_is_recalled(
    engine: EngineProcess, prompts: list[list[int]], cold: list[Answer]
) -> None:
    forget(engine)
    assert recalled(engine, prompts[0], 1).external_tokens == WHOLE
    forget(engine, connector=True)
    fresh = engine.ask(prompts[0], 32)
    assert (fresh.local_tokens, fresh.external_tokens) == (0, 0)
    assert fresh.token_ids == cold[0].token_ids
    forget(engine)
    assert recalled(engine, prompts[0], 1).external_tokens == WHOLE
