"""A model of three cache groups, two of which have a sliding window, below vLLM's own offloading, with the real engine.

Of every three layers one attends to all tokens and two to the last 96. The model was not trained that way, which its
answers suffer from; that recalled and computed ones are equal does not depend on it. vLLM's host memory holds less than
two of the prompts have. The tests form one story and run in this order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from .test_second_door import PAGE, ROW_BYTES, TEXTS, WHOLE, Story, story_of
from .wells import Well, in_one_process

LAYERS, GROUPS, WINDOW = 30, 3, 3 * PAGE
HYBRID = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if layer % GROUPS else "full_attention" for layer in range(LAYERS)],
}


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    disk = tmp_path_factory.mktemp("tier") / "disk"
    extra = {"hf_overrides": HYBRID}
    with story_of(well, model, folder, disk, 40 * ROW_BYTES // GROUPS, pool_pages=150, extra=extra) as story:
        yield story


def recalled(story: Story, texts: list[list[int]]) -> None:
    """Every answer is what it was, and comes of all that can be recalled of its prompt: of seven windows."""
    story.again(texts, recalled=WHOLE)


def test_what_vllm_has_evicted_is_recalled(story: Story, texts: list[list[int]]) -> None:
    story.joined()
    story.cold = [story.engine.ask(text, 16) for text in texts[:TEXTS]]
    assert not any(answer.external_tokens for answer in story.cold)
    recalled(story, texts)
    stats = story.well.stats()
    assert stats["block_bytes"] == stats["blocks"] * ROW_BYTES // GROUPS, "a chunk is of a third of the layers"


def test_an_engine_that_starts_again_recalls_at_once(story: Story, texts: list[list[int]]) -> None:
    """From here on engines are of one process, which start in less time."""
    story.settings = in_one_process(story.settings)
    story.restart("again")
    story.joined()
    recalled(story, texts)


def test_a_well_that_starts_again_reads_its_disk(story: Story, texts: list[list[int]]) -> None:
    story.well.stop()
    story.restart("after the well")
    story.joined()
    recalled(story, texts)
    assert story.well.stats()["disk_recalled_blocks"] > 0
