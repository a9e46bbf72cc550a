"""What ends the engines' campaigns early is counted, whatever it is, and so is what was counted before; fakes for all
engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lab.trust import engine as campaign
from lab.trust.budget import Budget
from lab.trust.canary import engine as canary
from lab.trust.engine.trial import Trial
from lab.trust.engine.well import TestedWell
from lab.trust.report import Row
from stepwell.demo.engine import EngineFailed
from stepwell.errors import ConfigError, ProtocolError

NONSENSE = ProtocolError("SW-804", what="nonsense", why="", fix="")


class FakeEngine:
    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        """Nothing to end."""

    kill = close


@pytest.fixture
def died(tmp_path: Path) -> EngineFailed:
    (log := tmp_path / "engine.log").write_text("its last words\n")
    return EngineFailed("the engine ended with status 1", log)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A campaign whose plain engine has answered, and in which all goes well unless a test says else."""

    @contextmanager
    def place(seed: int) -> Iterator[TestedWell]:
        yield TestedWell(tmp_path, None, "not asked for")

    monkeypatch.setattr(campaign, "find_spec", lambda name: True)
    monkeypatch.setattr(campaign, "tested_well", place)
    monkeypatch.setattr(campaign, "_setting", lambda well, budget: (None, []))
    monkeypatch.setattr(campaign.others, "rows", lambda budget: iter(()))
    monkeypatch.setattr(Trial, "_start", lambda self: FakeEngine())
    monkeypatch.setattr(Trial, "_look", lambda self, when, engines: None)
    monkeypatch.setattr(Trial, "fill", lambda self: None)
    monkeypatch.setattr(Trial, "serve", lambda self, requests: None)
    monkeypatch.setattr(Trial, "kill_engine", lambda self: None)
    monkeypatch.setattr(TestedWell, "stop", lambda self: None)
    return monkeypatch


def _rows(budget: Budget | None = None) -> dict[str, Row]:
    return {row.promise: row for row in campaign.run(budget or Budget(1))}


def _broken(rows: dict[str, Row]) -> dict[str, int]:
    return {promise: row.violations for promise, row in rows.items() if row.violations}


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def act(*_: Any, **__: Any) -> NoReturn:
        raise error

    return act


def _wrong(self: Trial) -> None:
    self.tally.wrong.add("wrong tokens", 7)


def test_nothing_is_broken_where_all_goes_well(trial: pytest.MonkeyPatch) -> None:
    rows = _rows()
    assert _broken(rows) == {} and rows[campaign.STARTED].cases == 1


def test_without_a_plain_engine_nothing_was_tried(trial: pytest.MonkeyPatch, died: EngineFailed) -> None:
    for error in (died, ConfigError("SW-113", what="", why="", fix="")):
        trial.setattr(campaign, "_setting", _raising(error))
        rows = _rows()
        assert not any(row.cases or row.violations for row in rows.values())
        assert "no plain engine" in rows[campaign.ANSWERED].remark


def test_engines_that_do_not_start_count(trial: pytest.MonkeyPatch, died: EngineFailed) -> None:
    trial.setattr(Trial, "_start", _raising(died))
    rows = _rows()
    assert _broken(rows) == {campaign.STARTED: 1} and rows[campaign.STARTED].cases == 1
    assert "its last words" in rows[campaign.STARTED].evidence[0]


def test_engines_that_recall_nothing_count(trial: pytest.MonkeyPatch) -> None:
    trial.setattr(Trial, "_start", _raising(TimeoutError("nothing was recalled")))
    assert _broken(_rows()) == {campaign.STARTED: 1}


def test_a_second_engine_that_does_not_start_counts(trial: pytest.MonkeyPatch) -> None:
    engines = iter([FakeEngine()])

    def start(self: Trial) -> FakeEngine:
        for engine in engines:
            return engine
        raise TimeoutError("nothing was recalled")

    def kill(self: Trial) -> None:
        self._end(self.engine.kill)
        self.begin()

    trial.setattr(Trial, "_start", start)
    trial.setattr(Trial, "kill_engine", kill)
    rows = _rows()
    assert _broken(rows) == {campaign.STARTED: 1}
    assert (rows[campaign.STARTED].cases, rows[campaign.LEFT].cases) == (2, 1)


def test_a_well_that_answers_with_an_error_when_it_is_to_end_loses_nothing(trial: pytest.MonkeyPatch) -> None:
    trial.setattr(Trial, "fill", _wrong)
    trial.setattr(TestedWell, "stop", _raising(NONSENSE))
    assert _broken(_rows()) == {campaign.ANSWERED: 7, campaign.LEFT: 1}


@pytest.mark.parametrize(
    "error", [NONSENSE, TimeoutError("too busy"), OSError("the disk has ended"), KeyError("stepwell")]
)
def test_whatever_ends_the_trial_counts_and_loses_nothing(trial: pytest.MonkeyPatch, error: Exception) -> None:
    trial.setattr(Trial, "fill", _wrong)
    trial.setattr(Trial, "serve", _raising(error))
    assert _broken(_rows()) == {campaign.ANSWERED: 8}
    trial.setattr(Trial, "serve", lambda self, requests: None)
    trial.setattr(Trial, "close", _raising(error))
    assert _broken(_rows()) == {campaign.ANSWERED: 7, campaign.LEFT: 1}


# canaries -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two that were clean, of as many as are wanted, and a third that was not; other weights are noticed."""

    @contextmanager
    def engine(*_: Any, **__: Any) -> Iterator[FakeEngine]:
        yield FakeEngine()

    monkeypatch.setattr(canary, "find_spec", lambda name: True)
    monkeypatch.setattr(canary, "_material", lambda: (Path("model"), [[1]]))
    monkeypatch.setattr(canary, "_engine", engine)
    monkeypatch.setattr(canary, "_heard", lambda base: (2, 0))
    monkeypatch.setattr(canary, "_ask", lambda *_: None)
    monkeypatch.setattr(canary, "_barred", lambda base: True)
    monkeypatch.setattr(canary, "changed", lambda *_: Path("other"))
    monkeypatch.setattr(canary, "_end", lambda home: None)
    return monkeypatch


def _canaries() -> list[tuple[str, int, int]]:
    budget = replace(Budget(1), scale=2 / 10_000, tell=lambda text: None)
    return [(row.promise, row.cases, row.violations) for row in canary.run(budget)]


def test_canaries_that_are_clean_and_tripped_break_nothing(canaries: pytest.MonkeyPatch) -> None:
    assert _canaries() == [(canary.CLEAN, 2, 0), (canary.TRIPPED, 1, 0)]


def test_canaries_without_a_model_are_not_tried(canaries: pytest.MonkeyPatch) -> None:
    canaries.setattr(canary, "_material", _raising(ConfigError("SW-113", what="no model", why="", fix="")))
    assert _canaries() == [(canary.CLEAN, 0, 0)]


def test_what_ends_canaries_early_counts_and_loses_nothing(canaries: pytest.MonkeyPatch, died: EngineFailed) -> None:
    for error in (died, NONSENSE, TimeoutError("not ready")):
        canaries.setattr(canary, "_engine", _raising(error))
        assert _canaries() == [(canary.CLEAN, 2, 1), (canary.TRIPPED, 1, 1)], error


def test_engines_that_never_have_a_canary_count(canaries: pytest.MonkeyPatch) -> None:
    canaries.setattr(canary, "NEWS_S", 0.0)
    canaries.setattr(canary, "_heard", lambda base: (0, 0))
    assert _canaries()[0] == (canary.CLEAN, 0, 1)


def test_other_weights_that_are_not_noticed_count(canaries: pytest.MonkeyPatch) -> None:
    canaries.setattr(canary, "WAIT_S", 0.0)
    canaries.setattr(canary, "_barred", lambda base: False)
    assert _canaries() == [(canary.CLEAN, 2, 0), (canary.TRIPPED, 1, 1)]
