"""Down to the disk and back: all is killed and comes back warm; wrong bytes, lost keys and bad directories are misses.

In float32, so that recalled, recomputed and cold answers must all be equal. The tests form one story and run in this
order.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.wire import Answer

from .conftest import names
from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, recalled, receipt, start, warm_up

PAGE = 32
PROMPT, WHOLE = 530, 512
BLOCKS = WHOLE // PAGE
TEXTS = 4


@dataclass
class Story:
    """The engine of the moment, and what it answered to each text when it computed everything itself."""

    well: Well
    disk: Path
    new: Callable[[int], EngineProcess]
    number: int = 0
    cold: list[Answer] = field(default_factory=list)

    def restart(self) -> EngineProcess:
        """SIGKILL to engine and well; new ones, with nothing left but files."""
        if self.number:
            self.engine.kill()  # first, or it would start the well again
            self.kill_well()
        self.number += 1
        drop_page_cache(self.disk)
        self.engine = self.new(self.number)
        return self.engine

    def kill_well(self) -> None:
        for pid in self.well.processes():
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: pid not in self.well.processes(), "the well's process has ended")  # type: ignore[misc]

    def written(self) -> None:
        eventually(lambda: self.well.stats()["disk_write_queue_bytes"] == 0, "everything is on disk")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "disk"


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, disk: Path) -> Iterator[Story]:
    with ExitStack() as stack:

        def new(number: int) -> EngineProcess:
            # Host memory holds fewer blocks than the texts have, whichever of them it keeps. Whether a busy machine's
            # disk is worth it is not asked here.
            connector = well.connector(block_tokens=PAGE, host="64MiB", disk=f"{disk}:512MiB", recall="always")
            settings = config(model, connector, page=PAGE, pool_pages=50, dtype="float32")
            if number > 2:  # by then engines of several processes have come, been killed and come back warm
                settings = in_one_process(settings)
            engine = stack.enter_context(start(settings, folder, f"engine{number}"))
            warm_up(engine, PAGE)
            return engine

        yield Story(well, disk, new)


def asked(story: Story, text: list[int]) -> Answer:
    answer = story.engine.ask(text[:PROMPT], 16)
    forget(story.engine)
    return answer


def contents(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.iterdir()}


def test_what_is_spilled_goes_down_to_the_disk(story: Story, texts: list[list[int]]) -> None:
    story.restart()
    story.cold = [asked(story, text) for text in texts[:TEXTS]]
    for _ in range(RECALL_ATTEMPTS):
        story.written()
        if story.well.stats()["disk_spilled_blocks"] >= TEXTS * BLOCKS:
            break
        # A disk that has not answered for a second gets no writes for a while: what would have gone there comes again.
        control.clear(story.well.home, ["host"])
        assert [asked(story, text).token_ids for text in texts[:TEXTS]] == [answer.token_ids for answer in story.cold]
    assert story.well.stats()["disk_spilled_blocks"] >= TEXTS * BLOCKS
    assert story.disk.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in story.disk.iterdir())


def test_more_than_fits_host_memory_is_recalled_from_disk(story: Story, texts: list[list[int]]) -> None:
    for _ in range(RECALL_ATTEMPTS):
        for text, cold in zip(texts, story.cold, strict=False):
            again = asked(story, text)
            assert again.token_ids == cold.token_ids
        if story.well.stats()["hits_staged"] > 0:
            break
    assert story.well.stats()["hits_staged"] > 0


def test_everything_is_killed_and_the_next_ones_are_warm(story: Story, texts: list[list[int]]) -> None:
    spilled = story.well.stats()["disk_spilled_blocks"]
    story.restart()
    assert story.well.stats()["disk_recovered_blocks"] >= 0.98 * spilled
    for text, cold in zip(texts, story.cold, strict=False):
        again = recalled(story.engine, text[:PROMPT], 16)
        forget(story.engine)
        assert again.token_ids == cold.token_ids
        assert receipt(again)["recalled_tokens"] == WHOLE
    # The first may come before there are slabs for it; and a busy machine may be too late for one, which is computed.
    assert story.well.stats()["hits_staged"] >= (TEXTS - 2) * BLOCKS


def test_a_well_killed_while_it_writes_leaves_nothing_wrong(story: Story, texts: list[list[int]]) -> None:
    fresh = [text[100:] for text in texts[:TEXTS]]
    cold = [story.engine.ask(text[:PROMPT], 16) for text in fresh]  # its spills are under way
    story.kill_well()
    story.restart()
    for text, first in zip(fresh, cold, strict=True):
        assert asked(story, text).token_ids == first.token_ids


def test_without_its_keyring_the_disk_is_kept_and_not_read(story: Story, texts: list[list[int]]) -> None:
    story.written()
    story.engine.kill()
    story.kill_well()
    keyring, aside = story.well.home / "keyring", story.well.home.with_name("keyring-aside")
    shutil.move(keyring, aside)
    before = contents(story.disk)
    story.number += 1
    story.engine = story.new(story.number)
    again = asked(story, texts[0])
    assert again.token_ids == story.cold[0].token_ids
    assert receipt(again)["recalled_tokens"] == 0
    assert story.well.stats()["disk_kept_segments"] > 0
    after = contents(story.disk)
    assert all(after[name] == content for name, content in before.items() if name.endswith(".seg"))
    story.engine.kill()
    story.kill_well()
    shutil.move(aside, keyring)
    story.number += 1
    story.engine = story.new(story.number)
    assert recalled(story.engine, texts[0][:PROMPT], 16).token_ids == story.cold[0].token_ids
    forget(story.engine)


def test_flipped_bytes_never_reach_the_engine(story: Story, texts: list[list[int]]) -> None:
    story.written()
    story.engine.kill()
    story.kill_well()
    for path in story.disk.glob("*.seg"):
        with path.open("r+b") as file:
            for at in range(8192 + 100, path.stat().st_size - (1 << 20), 256 << 10):  # several in each block
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    story.number += 1
    story.engine = story.new(story.number)
    for text, cold in zip(texts, story.cold, strict=False):
        assert asked(story, text).token_ids == cold.token_ids
    stats = story.well.stats()
    assert stats["disk_not_recalled_damaged"] > 0
    assert stats["hits_staged"] == 0


def test_a_directory_that_cannot_be_used_costs_the_engine_nothing(
    model: Path, folder: Path, texts: list[list[int]], story: Story
) -> None:
    story.engine.kill()
    well = Well(folder / "home-of-bad")
    place = Path(f"/dev/shm/stepwell-{os.getpid()}")
    connector = well.connector(block_tokens=PAGE, disk=f"{place}:512MiB")
    settings = config(model, connector, page=PAGE, pool_pages=50, dtype="float32")
    with start(in_one_process(settings), folder, "bad-directory") as engine:
        assert engine.ask(texts[0][:PROMPT], 16).token_ids == story.cold[0].token_ids
        eventually(
            lambda: "SW-609" in engine.log.read_text(), "the engine's log says what keeps the well from starting"
        )
        assert "raise `host`" in engine.log.read_text()
    assert not place.exists()
    assert well.processes() == []
    assert names(well.home) <= {"keyring", "README.txt", "stepwell.log", "fingerprints.json"}
