"""When blocks go down to the disk and come up again are settings, and each changes what a real engine finds. In float32
all answers must be equal.

One engine for all: it starts the well again whenever a test has ended it, and each new one reads its home's settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer
from stepwell.errors import BackendDown, StepwellError

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, receipt, start, warm_up

PAGE, PROMPT = 32, 530
BLOCKS = PROMPT // PAGE
GAP_S, TURNS = 6.0, 5
TURN = 3 * PAGE
"""Tokens that each turn of a conversation adds."""


@dataclass
class Story:
    well: Well
    engine: EngineProcess

    def restart(self, **settings: str) -> None:
        """The well ends, as it should, and another one comes, with nothing but the disk and these settings."""
        ended = self.well.pid()
        lines = [f"{name}: {value}\n" for name, value in {"recall": "always", **settings}.items()]
        (self.well.home / "stepwell.yaml").write_text("".join(lines))
        with suppress(BackendDown):  # it has ended, and the next one has its lock already
            control.stop(self.well.home, 1)
        eventually(lambda: self._serves(ended), "the engine has started another well")
        forget(self.engine)
        warm_up(self.engine, PAGE)

    def _serves(self, ended: int) -> bool:
        try:
            return self.well.pid() != ended and bool(self.well.stats()["sessions"])
        except StepwellError:
            return False  # none, for the moment

    def ask(self, prompt: list[int]) -> Answer:
        answer = self.engine.ask(prompt, 2)
        forget(self.engine)
        return answer

    def ask_again(self, prompt: list[int], **settings: str) -> Answer:
        """In a new life of the well. On a busy machine a recall may be given up for being late, which computing then
        is not: another life is asked then."""
        for _ in range(8):
            self.restart(**settings)
            late = self._given_up()
            answer = self.ask(prompt)
            if self._given_up() == late:
                break
        return answer

    def _given_up(self) -> int:
        return sum(n for name, n in self.well.stats().items() if name.startswith("gave_up_"))

    def written(self) -> int:
        """Blocks."""
        eventually(lambda: self.well.stats()["disk_write_queue_bytes"] == 0, "what was to be written is")
        return int(self.well.stats().get("disk_spilled_blocks", 0))

    def forget_host(self) -> None:
        self.written()
        control.clear(self.well.home, ["host"])


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well) -> Iterator[Story]:
    sizes = {"host": "512MiB", "disk": f"{folder}/disk:512MiB"}  # a sixteenth of host is for guesses
    connector = well.connector(canary=0, block_tokens=PAGE, **sizes)
    settings = config(model, connector, page=PAGE, pool_pages=50, dtype="float32")
    with start(in_one_process(settings), folder, "engine") as engine:
        warm_up(engine, PAGE)
        yield Story(well, engine)
    (well.home / "stepwell.yaml").unlink(missing_ok=True)


def from_disk(answer: Answer) -> int:
    """Blocks."""
    return int(receipt(answer)["tiers"].get("disk", 0)) // PAGE


@pytest.mark.parametrize(("at", "write"), list(enumerate(["through", "second_touch", "back"])))
def test_the_write_policy_says_what_a_next_life_finds(
    story: Story, texts: list[list[int]], at: int, write: str
) -> None:
    """One text is asked for twice, another one once; then the well ends."""
    twice, once = texts[2 * at][:PROMPT], texts[2 * at + 1][:PROMPT]
    story.restart(write=write)
    before, spilled = story.written(), story.well.stats()["spilled_blocks"]
    cold = [story.ask(twice), story.ask(once)]
    assert story.ask(twice).token_ids == cold[0].token_ids
    eventually(lambda: story.well.stats()["spilled_blocks"] >= spilled + 2 * BLOCKS, "all is in host memory")
    grew = story.written() - before
    assert grew == {"through": 2 * BLOCKS, "second_touch": BLOCKS, "back": 0}[write]
    again = [story.ask_again(twice, write=write), story.ask_again(once, write=write)]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in cold]
    found = [from_disk(answer) for answer in again]
    print(write, "written", grew, "found", found, [receipt(answer) for answer in again])
    assert found[0] > 0
    assert (found[1] == 0) is (write == "second_touch")


@pytest.mark.parametrize(("at", "prefetch"), list(enumerate(["on", "off"])))
def test_what_is_expected_is_there_before_it_is_asked_for(
    story: Story, texts: list[list[int]], at: int, prefetch: str
) -> None:
    """A conversation at regular times, of which host memory forgets everything after each turn."""
    story.restart(prefetch=prefetch)
    for text in texts[:3]:  # so that it is known how fast the disk is
        story.ask(text[:PROMPT])
        story.forget_host()
        story.ask(text[:PROMPT])
    text = texts[6 + at]
    answers: list[Answer] = []
    began = time.monotonic()
    for turn in range(TURNS + RECALL_ATTEMPTS - 1):  # the last is repeated where a machine was too busy for it
        time.sleep(max(0.0, began + turn * GAP_S - time.monotonic()))
        answers.append(story.ask(text[: PROMPT - TURN * max(0, TURNS - 1 - turn)]))
        story.forget_host()
        if turn >= TURNS - 1 and receipt(answers[-1])["recalled_tokens"]:
            break
    tiers = [receipt(answer)["tiers"] for answer in answers]
    print(prefetch, tiers, {key: n for key, n in story.well.stats().items() if "prefetch" in key})
    there = (PROMPT - TURN) // PAGE  # what the turn before the last had
    if prefetch == "on":
        assert from_disk(answers[-1]) == 0
        assert receipt(answers[-1])["tiers"]["host"] >= there * PAGE
        assert story.well.stats()["disk_prefetched_blocks"] >= there
    else:
        assert from_disk(answers[-1]) >= there
        assert "disk_prefetched_blocks" not in story.well.stats()
