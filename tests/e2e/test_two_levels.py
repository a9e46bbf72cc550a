"""Two levels below host memory, with the real engine: what the disk has lost or damaged comes from a remote tier.

In float32, so that recalled and computed answers must be equal. The tests form one story and run in this order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer

from .wells import Well, config, eventually, forget, in_one_process, recalled, receipt, start, warm_up

PAGE = 32
WHOLE = 512
TEXTS = 2


@dataclass
class Story:
    """What the engine answered to each text when it computed everything itself."""

    well: Well
    disk: Path
    engine: EngineProcess
    cold: list[Answer] = field(default_factory=list)

    def written(self) -> None:
        def all_is() -> bool:
            stats = self.well.stats()
            return not (stats["disk_write_queue_bytes"] or stats["remote_write_queue_bytes"])

        eventually(all_is, "everything is written to both tiers")

    def clear(self, *tiers: str) -> None:
        control.clear(self.well.home, list(tiers))
        forget(self.engine)

    def recalled_from(self, texts: list[list[int]], tier: str) -> None:
        """Most comes from this tier, and each answer is what it was. On a busy machine an attempt may be late: what it
        had promoted is in host memory and on disk then, or the engine has computed and spilled it."""
        before = self.read()
        for text, cold in zip(texts[:TEXTS], self.cold, strict=True):
            answer = recalled(self.engine, text)
            assert answer.token_ids == cold.token_ids
            assert set(receipt(answer)["tiers"]) <= {"host", "disk", "remote"}, receipt(answer)
            forget(self.engine)
        read = {name: blocks - before[name] for name, blocks in self.read().items()}
        assert read[tier] == max(read.values()) > 0, read

    def read(self) -> dict[str, int]:
        """Blocks that each tier has brought so far."""
        stats = self.well.stats()
        return {tier: int(stats.get(f"{tier}_recalled_blocks", 0)) for tier in ("disk", "remote")}


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    disk = tmp_path_factory.mktemp("tier") / "disk"
    command = [sys.executable, "-m", "lab.rig.two_levels", str(well.home), "128MiB", f"{disk}:512MiB"]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None and process.stdout.readline().startswith("serving")
        connector = well.connector(recall="always", block_tokens=PAGE)
        del connector["kv_connector_extra_config"]["host"]
        settings = in_one_process(config(model, connector, page=PAGE, pool_pages=50, dtype="float32"))
        engine = stack.enter_context(start(settings, folder, "engine"))
        warm_up(engine, PAGE)
        yield Story(well, disk, engine)


def test_what_is_computed_is_written_to_both(story: Story, texts: list[list[int]]) -> None:
    for text in texts[:TEXTS]:
        story.cold.append(story.engine.ask(text))
        forget(story.engine)
    story.written()
    stats = story.well.stats()
    assert stats["tiers"] == "host,disk,remote"
    assert stats["disk_blocks"] == stats["remote_blocks"] >= TEXTS * WHOLE // PAGE


def test_the_disk_is_read_first(story: Story, texts: list[list[int]]) -> None:
    story.clear("host")
    story.recalled_from(texts, "disk")


def test_what_the_disk_has_lost_comes_from_the_remote_tier_and_is_written_to_disk(
    story: Story, texts: list[list[int]]
) -> None:
    story.clear("host", "disk")
    assert story.well.stats()["disk_blocks"] == 0
    story.recalled_from(texts, "remote")
    story.written()
    assert story.well.stats()["disk_blocks"] >= TEXTS * WHOLE // PAGE


def test_what_is_damaged_on_disk_comes_from_the_remote_tier(story: Story, texts: list[list[int]]) -> None:
    story.clear("host")
    for segment in story.disk.glob("*.seg"):
        with segment.open("r+b") as file:
            for at in range(8192, segment.stat().st_size, 64 << 10):
                file.seek(at)
                file.write(b"\xa5" * 512)
    story.recalled_from(texts, "remote")
    assert story.well.stats()["disk_not_recalled_damaged"] > 0


def test_people_see_each_tier_by_its_name(story: Story) -> None:
    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "stepwell", *arguments, "--home", str(story.well.home)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    stats = said("stats")
    assert "disk tier: " in stats and "remote tier: " in stats
    assert "remote" in said("explain", "--decisions")
    assert "remote tier: " in said("cache", "clear", "--tier", "remote")
    assert story.well.stats()["remote_blocks"] == 0 < story.well.stats()["disk_blocks"]
