"""An engine in the process of its user that sleeps, as in reinforcement learning: no error, and nothing of before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo.engine import EngineProcess

from .wells import Well, config, forget, in_one_process, recalled, start, warm_up

PROMPT, WHOLE = 530, 512


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path, well: Well) -> Iterator[EngineProcess]:
    settings = config(model, well.connector(), dtype="float32")
    with start(in_one_process(settings), folder, "engine") as engine:
        yield engine


def test_sleep_never_fails_and_nothing_of_before_is_recalled(engine: EngineProcess, texts: list[list[int]]) -> None:
    """The engine makes no step between the last token and the sleep, so the spill of a request of one token, and the
    last block of the others, are yet to come."""
    warm_up(engine, 128)
    prompts = [text[:PROMPT] for text in texts[:2]]
    first = [engine.ask(prompt, 32) for prompt in prompts]
    forget(engine)
    assert [recalled(engine, prompt).token_ids for prompt in prompts] == [answer.token_ids for answer in first]
    for tokens in (1, 32, 1):
        assert engine.ask(texts[2][:PROMPT], tokens).finish_reason == "length"
        engine.nap()
        again = [engine.ask(prompt, 32) for prompt in prompts]
        assert [(answer.local_tokens, answer.external_tokens) for answer in again] == [(0, 0)] * 2
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
        forget(engine)
        assert recalled(engine, prompts[0]).external_tokens == WHOLE, "spilled anew"
