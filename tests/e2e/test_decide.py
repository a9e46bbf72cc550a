"""A disk that is slower than computing is left alone by default, used when told so, and found out about when it is fast
again. In float32 all answers must be equal. The tests form one story and run in this order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer
from stepwell.serve.home.calibration import COSTS_NAME

from .wells import Well, config, eventually, forget, in_one_process, receipt, start, warm_up

PAGE, PROMPT, TEXTS = 32, 530, 2
SLOW = 6e6
"""Bytes a second: a block of 1.4 MB takes 0.25 s, in which an engine computes several."""


@dataclass
class Story:
    well: Well
    engine: EngineProcess
    speed: Path
    cold: list[Answer] = field(default_factory=list)

    def ask(self, text: list[int], recall: str = "") -> Answer:
        """With nothing of it anywhere but on disk."""
        forget(self.engine)
        eventually(lambda: self.well.stats()["disk_write_queue_bytes"] == 0, "everything is on disk")
        control.clear(self.well.home, ["host"])
        wish = {"extra_args": {"kv_transfer_params": {"stepwell": {"recall": recall}}}} if recall else {}
        return self.engine.ask(text[:PROMPT], 16, **wish)

    def decided(self, why: str) -> int:
        return int(self.well.stats().get(f"decided_{why}", 0))


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well) -> Iterator[Story]:
    speed = folder / "speed"
    speed.write_text("0")
    command = [sys.executable, "-m", "lab.bench.serving.throttle", well.home, "256MiB", f"{folder}/disk:512MiB", speed]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "ready" in process.stdout.readline()
        settings = config(model, well.connector(canary=0, block_tokens=PAGE), page=PAGE, pool_pages=50, dtype="float32")
        try:
            with start(in_one_process(settings), folder, "engine") as engine:
                warm_up(engine, PAGE)
                yield Story(well, engine, speed)
        finally:
            process.terminate()


def test_steps_are_timed_and_the_first_blocks_from_disk_too(story: Story, texts: list[list[int]]) -> None:
    for text in texts[2:6]:
        story.ask(text)
    story.cold = [story.ask(text) for text in texts[:TEXTS]]
    for text, cold in zip(texts, story.cold, strict=False):
        assert story.ask(text).token_ids == cold.token_ids
    assert story.decided("unknown") + story.decided("worth_it") >= TEXTS


def test_a_slow_disk_is_left_alone(story: Story, texts: list[list[int]]) -> None:
    story.speed.write_text(str(SLOW))
    story.ask(texts[0], "always")  # so that it is seen to be slow
    before = story.decided("recompute_cheaper")

    def refused() -> bool:
        answer = story.ask(texts[0])
        assert answer.token_ids == story.cold[0].token_ids
        return receipt(answer)["recalled_tokens"] == 0 and story.decided("recompute_cheaper") > before

    eventually(refused, "the disk is refused")


def test_it_is_used_where_that_is_asked_for(story: Story, texts: list[list[int]]) -> None:
    def used() -> bool:
        answer = story.ask(texts[0], "always")
        assert answer.token_ids == story.cold[0].token_ids
        return bool(receipt(answer)["tiers"].get("disk"))

    eventually(used, "something is recalled from the slow disk")


def test_never_is_never(story: Story, texts: list[list[int]]) -> None:
    story.speed.write_text("0")
    answer = story.ask(texts[0], "never")
    assert receipt(answer)["recalled_tokens"] == 0
    assert answer.token_ids == story.cold[0].token_ids


def test_a_disk_that_has_become_fast_is_found_out(story: Story, texts: list[list[int]]) -> None:
    def recalled() -> bool:
        answer = story.ask(texts[1])
        assert answer.token_ids == story.cold[1].token_ids
        return bool(receipt(answer)["tiers"].get("disk"))

    eventually(recalled, "the disk is used again")
    assert story.decided("worth_it") > 0


def test_decisions_are_told_in_words(story: Story) -> None:
    home = ["--home", str(story.well.home)]
    said = CliRunner().invoke(app, ["explain", "--decisions", "--last", "50", *home]).output
    assert "decided: recall nothing; computing was expected to be faster" in said
    assert "the mode is always" in said
    assert "longer than the best choice in hindsight" in said
    rows = json.loads(CliRunner().invoke(app, ["explain", "--json", *home]).output)["decisions"]
    assert rows and all(row["ended"] for row in rows[1:])


def test_what_prefill_costs_outlives_the_well(story: Story) -> None:
    control.stop(story.well.home)
    (cost,) = json.loads((story.well.home / COSTS_NAME).read_text()).values()
    assert cost[1] > 0
