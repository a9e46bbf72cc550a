"""The campaign's judgement of disks that hang: what it counts, and that nothing it has seen is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from lab.trust.budget import Budget
from lab.trust.engine import hang
from lab.trust.engine.prompts import Prompt
from lab.trust.engine.well import TestedWell
from lab.trust.report import Row
from stepwell.demo.engine import EngineFailed
from stepwell.demo.wire import Answer, Question
from stepwell.testing.fuse import FuseReport

PROMPTS = [Prompt((n,), (), ()) for n in range(4)]
SMALL = replace(Budget(1), scale=4 / 1400)
"""Four lone pairs and one of two, or two."""


class FakeDisk:
    """Meets a read whenever it hangs."""

    def __init__(self) -> None:
        self.hangs = False

    def set(self, *rules: Any) -> None:
        self.hangs = True

    def heal(self) -> None:
        self.hangs = False

    def report(self) -> FuseReport:
        return FuseReport([1], 0)


class FakeEngine:
    """Answers after 0.2 s, and `held_s` later while the disk hangs, of which it knows `told_s`. Ends at a request
    beyond `life`."""

    def __init__(self, disk: FakeDisk, held_s: float, told_s: float, life: float = float("inf")) -> None:
        self.disk, self.held_s, self.told_s, self.life = disk, held_s, told_s, life
        self.tiers = {"disk": 32}

    def pids(self) -> list[int]:
        return []

    def reset_prefix_cache(self) -> bool:
        return True

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        return self.ask_all([Question(prompt, tokens)])[0]

    def ask_all(self, questions: list[Question]) -> list[Answer]:
        self.life -= 1
        if self.life < 0:
            raise EngineFailed("the engine has ended", Path("/dev/null"))
        late, told = (self.held_s, self.told_s) if self.disk.hangs else (0.0, 0.0)
        receipt = {"stepwell": {"wait_ms": 1e3 * told, "recalled_tokens": 0, "tiers": self.tiers}}
        one = Answer(0.2 + late, 0.3 + late, 1, [1], "", "length", 0, 0, 0, receipt)
        return [one] * len(questions)


def _tried(engine: FakeEngine, budget: Budget = SMALL) -> tuple[Row, Row]:
    well = TestedWell(Path("/nowhere"), engine.disk, "")  # type: ignore[arg-type]
    lone, beside = hang.rows(engine, well, PROMPTS, budget)  # type: ignore[arg-type]
    return lone, beside


def test_requests_that_are_held_in_time_are_right() -> None:
    lone, beside = _tried(FakeEngine(FakeDisk(), 0.305, 0.302))
    assert (lone.cases, lone.violations, beside.violations) == (4, 0, 0) and beside.cases >= 1
    assert "held requests for, p50 302 ms" in lone.remark and "later than that of misses" in lone.remark


def test_a_connector_that_holds_too_long_is_wrong() -> None:
    lone, _ = _tried(FakeEngine(FakeDisk(), 0.35, 0.35))
    assert lone.violations == 4


def test_a_connector_that_does_not_know_that_it_holds_is_wrong() -> None:
    lone, _ = _tried(FakeEngine(FakeDisk(), 0.6, 0.302))
    assert lone.violations == 1 and "later than a miss" in lone.evidence[0]


def test_an_engine_that_ends_counts_and_loses_nothing() -> None:
    lone, _ = _tried(FakeEngine(FakeDisk(), 0.35, 0.35, life=4 * 5 + 1))
    assert lone.cases == 3 and lone.violations >= 3 and "the engine has ended" in lone.evidence[0]


def test_a_disk_that_is_left_alone_for_ever_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "PATIENCE_S", 0.01)
    engine = FakeEngine(FakeDisk(), 0.3, 0.3)
    engine.tiers = {"host": 32}
    lone, _ = _tried(engine)
    assert (lone.cases, lone.violations) == (0, 1) and "nothing came from a healed disk" in lone.evidence[0]


def test_a_disk_is_asked_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(FakeDisk(), 0.3, 0.3)
    engine.tiers = {}
    asked = 0

    def ask(prompt: list[int], tokens: int) -> Answer:
        nonlocal asked
        asked += 1
        engine.tiers = {"disk": 1} if asked > 3 * len(PROMPTS) else {}
        return engine.ask_all([Question(prompt, tokens)])[0]

    monkeypatch.setattr(engine, "ask", ask)
    assert hang._until_read(engine, cycle(PROMPTS))  # type: ignore[arg-type]
    assert asked == 3 * len(PROMPTS) + 1
