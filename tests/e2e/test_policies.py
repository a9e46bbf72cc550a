"""What the well keeps is its policy's choice: one engine, the same requests, wells with other settings, and other
prefixes are recalled. In float32 all answers must be equal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepwell.client import control
from stepwell.demo.engine import EngineProcess

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, receipt, start, warm_up

PAGE, PROMPT = 32, 530
HOST = "64MiB"
"""Some 40 blocks of 1.4 MB: two and a half prompts."""


@dataclass
class Story:
    well: Well
    engine: EngineProcess
    folder: Path
    texts: list[list[int]]
    answers: dict[int, list[int]] = field(default_factory=dict)

    @contextmanager
    def with_well(self, *flags: str, **settings: str) -> Iterator[None]:
        """A well with these settings, empty, that the engine has joined."""
        env = os.environ | {f"STEPWELL_{name.upper()}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "stepwell", "serve", "--home", str(self.well.home), "--host", HOST]
        command += ["--socket", str(self.socket), *flags]
        with (self.folder / "wells.log").open("ab") as log, subprocess.Popen(command, env=env, stdout=log) as process:
            try:
                forget(self.engine)
                warm_up(self.engine, PAGE)
                yield
            finally:
                process.terminate()
                assert process.wait(30) == 0

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    def stats(self) -> dict[str, Any]:
        return control.stats(self.well.home, socket=self.socket)

    def ask(self, number: int) -> dict[str, int]:
        """Tokens recalled, by tier; the engine itself has nothing of it."""
        forget(self.engine)
        answer = self.engine.ask(self.texts[number][:PROMPT], 4)
        assert self.answers.setdefault(number, answer.token_ids) == answer.token_ids
        tiers: dict[str, int] = receipt(answer)["tiers"]
        eventually(lambda: self.stats().get("disk_write_queue_bytes", 0) == 0, "everything is on disk")
        return tiers

    def ask_again(self, number: int) -> dict[str, int]:
        """The same for what must be recalled: asked again where a machine that is far too busy kept it from that."""
        for _ in range(RECALL_ATTEMPTS):
            if sum((tiers := self.ask(number)).values()):
                return tiers
        raise AssertionError(f"not recalled in {RECALL_ATTEMPTS} attempts")


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, texts: list[list[int]]) -> Iterator[Story]:
    """Its engine never starts a well."""
    folder.chmod(0o700)
    connector = well.connector(canary=0, block_tokens=PAGE)
    connector["kv_connector_extra_config"] |= {"socket": str(folder / "socket")}
    del connector["kv_connector_extra_config"]["home"], connector["kv_connector_extra_config"]["host"]
    settings = config(model, connector, page=PAGE, pool_pages=50, dtype="float32")
    with start(in_one_process(settings), folder, "engine") as engine:
        yield Story(well, engine, folder, texts)


def test_eviction_says_what_is_left_of_more_than_fits(story: Story) -> None:
    """Five prompts in turns, twice what fits: the last used are never those that come next."""
    hits = {}
    for policy in ("lru", "auto"):
        with story.with_well(policy=policy):
            rounds = [[sum(story.ask(number).values()) for number in range(5)] for _ in range(6)]
            hits[policy] = sum(map(sum, rounds[1:])) / (5 * 5 * PROMPT)
    print(hits)
    assert hits["lru"] < 0.15, "0 where every prompt is spilled whole, which a busy machine does not reach"
    assert hits["auto"] > 0.2


def test_admission_says_what_is_let_in(story: Story) -> None:
    """What was asked for once is not taken where twice is wanted."""
    with story.with_well(policy="second_touch"):
        assert [sum(story.ask(0).values()) for _ in range(2)] == [0, 0]
        story.ask_again(0)
        assert story.stats()["spills_refused_not_worth_it"]
    with story.with_well(policy="auto"):
        assert not sum(story.ask(0).values())
        story.ask_again(0)
        assert not story.stats().get("spills_refused_not_worth_it", 0)


def test_placement_says_where_it_is_found(story: Story) -> None:
    """What is used again stays in host memory while something else comes; or all goes through it in its turn."""

    def from_disk(placement: str, attempt: int) -> int:
        disk = story.folder / f"disk-{placement}-{attempt}"
        with story.with_well("--disk", f"{disk}:512MiB", policy="lru", placement=placement):
            for number in (0, 1, 0, 2):
                story.ask(number)
            return story.ask_again(0).get("disk", 0)

    assert from_disk("hot", 0) == 0
    # A disk that has not answered for a second gets no writes for a while, and what would have gone there is gone.
    assert any(from_disk("warm", attempt) for attempt in range(RECALL_ATTEMPTS))
