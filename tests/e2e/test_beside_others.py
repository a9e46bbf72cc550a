"""A real engine whose connector is vLLM's MultiConnector: as a part of it stepwell keeps away, and says so once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepwell.demo.engine import EngineProcess

from .wells import Well, config, forget, in_one_process, start

PROMPT, TOKENS = 530, 32


@dataclass(frozen=True, slots=True)
class Two:
    """An engine alone, and one with both connectors."""

    alone: EngineProcess
    both: EngineProcess


@pytest.fixture(scope="module")
def two(model: Path, folder: Path, well: Well) -> Iterator[Two]:
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    both: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, well.connector()]},
    }
    hybrid = {"disable_hybrid_kv_cache_manager": True}  # which vLLM's example does not know
    with (
        start(in_one_process(config(model, None, dtype="float32", extra=hybrid)), folder, "alone") as alone,
        start(in_one_process(config(model, both, dtype="float32", extra=hybrid)), folder, "both") as engine,
    ):
        yield Two(alone, engine)


def test_a_part_of_multiconnector_leaves_the_engine_as_it_is(two: Two, folder: Path, texts: list[list[int]]) -> None:
    for text in [*texts[:3], *texts[:3]]:
        one, other = two.alone.ask(text[:PROMPT], TOKENS), two.both.ask(text[:PROMPT], TOKENS)
        assert (other.finish_reason, len(other.token_ids)) == ("length", TOKENS)
        assert other.token_ids == one.token_ids
        assert one.cached_tokens == 0
        print(f"same {TOKENS} tokens; cached by the other part: {other.cached_tokens} of {PROMPT}")
        for engine in (two.alone, two.both):
            forget(engine)
    inert = [line for line in (folder / "both.log").read_text(errors="replace").splitlines() if "SW-718" in line]
    print("\n".join(inert))
    assert len(inert) == 1 and "MultiConnector" in inert[0]
