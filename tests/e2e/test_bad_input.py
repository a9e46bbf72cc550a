"""What a person gets wrong is said where that person looks, once by each half, and the engine serves all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.demo.engine import EngineFailed
from stepwell.demo.wire import Answer

from .wells import Well, config, eventually, forget, in_one_process, start


def lines(log: Path, code: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if f"[{code}]" in line]


def serves(answer: Answer) -> bool:
    return answer.finish_reason == "length" and len(answer.token_ids) == 8 and answer.external_tokens == 0


def test_a_misspelt_setting(model: Path, folder: Path, well: Well, texts: list[list[int]]) -> None:
    with start(config(model, well.connector(hosst="1GiB")), folder, "misspelt") as engine:
        eventually(lambda: bool(lines(engine.log, "SW-101")), "the error is in the engine's log")
        assert serves(engine.ask(texts[0][:300], 8))
        forget(engine)
        assert serves(engine.ask(texts[0][:300], 8))
        told = lines(engine.log, "SW-101")
        assert len(told) <= 1, told
        assert all("ERROR" in line and "hosst is not a setting; did you mean host?" in line for line in told)
    assert well.processes() == []


def test_strict_refuses_to_start(model: Path, folder: Path, well: Well) -> None:
    with pytest.raises(EngineFailed) as failed:
        start(in_one_process(config(model, well.connector(hosst="1GiB", strict=True))), folder, "strict").kill()
    assert lines(failed.value.log, "SW-101")
