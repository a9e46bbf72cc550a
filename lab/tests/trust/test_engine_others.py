"""Engines of other models in the campaign: their prompts, and that what goes wrong with them counts; fakes for all
engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.trust.budget import Budget
from lab.trust.engine import others
from lab.trust.engine.control import Noticed
from lab.trust.engine.others import MOST_TOKENS, OTHERS, OUTPUT, Other
from lab.trust.engine.prompts import Prompt
from lab.trust.engine.trial import NotStarted, Trial
from lab.trust.engine.well import PAGE, TestedWell
from lab.trust.report import Row
from stepwell.demo.wire import Answer


class FakeEngine:
    """Answers whatever it is asked with the same tokens. It is a process in a `with` statement, too."""

    def __init__(self, *_: object) -> None:
        """Starts nothing."""

    def ask(self, prompt: list[int], tokens: int, **_: Any) -> Answer:
        ones = [1.0] * tokens
        return Answer(0.1, 0.2, len(prompt), [7] * tokens, "", "length", 0, 0, 0, logprobs=[*ones], margins=[*ones])

    def wait_ready(self) -> None:
        """It is."""

    def metrics(self) -> dict[str, float]:
        return {"vllm:spec_decode_num_drafts": 5.0, "vllm:num_preemptions": 1.0}

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """It has ended."""


def test_prompts_go_on_behind_answers_and_fit_the_engine() -> None:
    known = others._known(FakeEngine(), random.Random(1), 3)  # type: ignore[arg-type]
    first, next_turns = known[: len(known) // 2], known[len(known) // 2 :]
    assert all(len(prompt.tokens) + OUTPUT <= MOST_TOKENS for prompt in known)
    for before, after in zip(first, next_turns, strict=True):
        generated = len(before.tokens) + OUTPUT
        assert after.tokens[:generated] == (*before.tokens, *before.answer)
        assert len(before.tokens) // PAGE < generated // PAGE < len(after.tokens) / PAGE, "a block with tokens of it"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """All goes well unless a test says else."""

    @contextmanager
    def place(seed: int) -> Iterator[TestedWell]:
        yield TestedWell(tmp_path, None, "not asked for")

    def begin(self: Trial) -> None:
        self._engine = FakeEngine()  # type: ignore[assignment]

    def tries(engine: object, well: object, prompts: list[Prompt], block: int, name: str, found: Noticed) -> None:
        found.cases += 9

    monkeypatch.setattr(others, "tested_well", place)
    monkeypatch.setattr(others, "EngineProcess", FakeEngine)
    monkeypatch.setattr(others, "try_each", tries)
    monkeypatch.setattr(Other, "configs", lambda self, well: (None, None))
    for name in ("fill", "close"):
        monkeypatch.setattr(Trial, name, lambda self: None)
    monkeypatch.setattr(Trial, "begin", begin)
    monkeypatch.setattr(Trial, "live", lambda self, requests, lives: self.tally.answered.update(calm=requests))
    return monkeypatch


def _rows() -> list[Row]:
    return list(others.rows(Budget(1)))


def test_nothing_is_broken_where_all_goes_well(trial: pytest.MonkeyPatch) -> None:
    *rows, noticed = _rows()
    assert [(row.cases, row.violations) for row in rows] == [(30, 0)] * len(OTHERS)
    assert all(row.remark.endswith("5 drafts") for row in rows)
    assert (noticed.cases, noticed.violations) == (9 * len(OTHERS), 0)


@pytest.mark.parametrize("error", [NotStarted("nothing was recalled"), OSError("the disk has ended")])
def test_whatever_ends_one_counts_and_costs_the_others_nothing(trial: pytest.MonkeyPatch, error: Exception) -> None:
    live, names = Trial.live, []

    def once(self: Trial, requests: int, lives: int) -> None:
        names.append(self._name)
        if len(names) == 1:
            raise error
        live(self, requests, lives)

    trial.setattr(Trial, "live", once)
    *rows, _ = _rows()
    assert [row.violations for row in rows] == [1, *[0] * (len(OTHERS) - 1)]
    assert str(error) in rows[0].evidence[0]


def test_a_wrong_page_that_nobody_notices_is_a_violation(trial: pytest.MonkeyPatch) -> None:
    def tries(engine: object, well: object, prompts: list[Prompt], block: int, name: str, found: Noticed) -> None:
        found.unnoticed.append(name)

    trial.setattr(others, "try_each", tries)
    assert [row.violations for row in _rows()] == [*[0] * len(OTHERS), len(OTHERS)]
