"""An engine that drafts tokens by n-grams above our tier below vLLM's own offloading, with the real engine. The tests
form one story and run in this order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from .test_second_door import PAGE, ROW_BYTES, TEXTS, Story, story_of
from .test_speculation import NGRAMS
from .wells import Well

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def story(model: Path, folder: Path, well: Well, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    disk = tmp_path_factory.mktemp("tier") / "disk"
    extra = {"speculative_config": NGRAMS}
    with story_of(well, model, folder, disk, 40 * ROW_BYTES, pool_pages=50, extra=extra) as story:
        yield story


def test_what_vllm_has_evicted_is_recalled(story: Story, texts: list[list[int]]) -> None:
    story.joined()
    story.cold = [story.engine.ask(text, 16) for text in texts[:TEXTS]]
    story.again(texts, recalled=PAGE)
    assert story.well.stats()["recalled_blocks"] > 0


def test_an_engine_that_starts_again_recalls_at_once(story: Story, texts: list[list[int]]) -> None:
    story.restart("again")
    story.joined()
    story.again(texts, recalled=PAGE)
