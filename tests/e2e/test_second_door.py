"""vLLM's own offloading with a well below it, with the real engine: answers, restarts and what breaks.

In float32, so that recalled and computed answers must be equal. vLLM's host memory holds fewer chunks than two of the
prompts have, so that what is asked for again comes from the well. The tests form one story and run in this order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.wire import Answer
from stepwell.errors import BackendDown

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, in_one_process, start

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

SHIM = Path(__file__).parents[2] / "benchmarks" / "peers"
PAGE, WHOLE, TEXTS = 32, 672, 4
ROW_BYTES = 30 * 2 * 3 * 64 * 4 * PAGE


@dataclass
class Story:
    """What the engine answered to each text when it computed everything itself."""

    well: Well
    settings: EngineConfig
    folder: Path
    disk: Path
    engine: EngineProcess
    cold: list[Answer] = field(default_factory=list)

    def again(self, texts: list[list[int]], *, recalled: int) -> None:
        """Every answer is what it was, and so many tokens of each prompt at least come from the well, at the latest
        when the machine has had time for it."""
        for text, cold in zip(texts[:TEXTS], self.cold, strict=True):
            for _ in range(RECALL_ATTEMPTS):
                forget(self.engine)
                answer = self.engine.ask(text, 16)
                assert answer.token_ids == cold.token_ids
                assert answer.external_tokens is not None
                if answer.external_tokens >= recalled:
                    break
            assert answer.external_tokens >= recalled, "not recalled"

    def restart(self, name: str) -> None:
        self.engine.close()
        self.engine = start(self.settings, self.folder, name)

    def joined(self) -> None:
        def has_joined() -> bool:
            forget(self.engine)
            self.engine.ask([5] * (2 * PAGE + 1), 1)
            with suppress(BackendDown):  # it is being started
                return self.well.stats()["sessions"] == 1
            return False

        eventually(has_joined, "the engine's session is there")


@contextmanager
def story_of(well: Well, model: Path, folder: Path, disk: Path, rows_bytes: int, **shape: Any) -> Iterator[Story]:
    """An engine whose offloading has so much host memory and our tier below it."""
    tier = {"type": "stepwell", "home": str(well.home), "host": "128MiB", "disk": f"{disk}:512MiB"}
    offloading: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "peers_cpu_shim",
            "cpu_bytes_to_use": rows_bytes,
            "secondary_tiers": [tier],
        },
    }
    settings = config(model, offloading, page=PAGE, dtype="float32", **shape)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SHIM))))
    settings.env["PYTHONPATH"] = path
    with ExitStack() as stack:
        story = Story(well, settings, folder, disk, start(settings, folder, "engine"))
        stack.callback(lambda: story.engine.close())
        yield story


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    disk = tmp_path_factory.mktemp("tier") / "disk"
    with story_of(well, model, folder, disk, 40 * ROW_BYTES, pool_pages=50) as story:
        yield story


def test_what_vllm_has_evicted_is_recalled(story: Story, texts: list[list[int]]) -> None:
    story.joined()
    story.cold = [story.engine.ask(text, 16) for text in texts[:TEXTS]]
    assert not any(answer.external_tokens for answer in story.cold)
    story.again(texts, recalled=PAGE)
    assert story.well.stats()["recalled_blocks"] > 0
    shown = CliRunner().invoke(app, ["stats", "--home", str(story.well.home)]).output
    assert shown.splitlines()[0].endswith(" (below vLLM's offloading)"), shown


def test_an_engine_that_starts_again_recalls_at_once(story: Story, texts: list[list[int]]) -> None:
    story.restart("again")
    story.joined()
    story.again(texts, recalled=PAGE)


def test_a_well_that_starts_again_reads_its_disk(story: Story, texts: list[list[int]]) -> None:
    """From here on engines are of one process, which start in less time."""
    story.well.stop()
    story.settings = in_one_process(story.settings)
    story.restart("after the well")
    story.joined()
    story.again(texts, recalled=PAGE)
    assert story.well.stats()["disk_recalled_blocks"] > 0


def test_flipped_bytes_are_computed_again(story: Story, texts: list[list[int]]) -> None:
    story.engine.close()
    story.well.stop()
    segments = list(story.disk.glob("*.seg"))
    assert segments
    for segment in segments:
        with segment.open("r+b") as file:
            for at in range(4096, segment.stat().st_size, 64 << 10):
                file.seek(at + 777)
                byte = file.read(1)
                file.seek(at + 777)
                file.write(bytes([byte[0] ^ 0x10]))
    story.engine = start(story.settings, story.folder, "flipped")
    story.joined()
    story.again(texts, recalled=0)


def test_a_well_that_is_killed_costs_no_request(story: Story, texts: list[list[int]]) -> None:
    os.kill(story.well.pid(), signal.SIGKILL)
    story.again(texts, recalled=0)
    story.joined()  # another one was started
    story.again(texts, recalled=0)
