"""Engines that zero the pages which a step takes before they tell the connector of it, as CUDA's default model runner
does for states and for KV of several precisions: what is copied out of a page is waited for earlier, or given up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from .build import STATE
from .local import come_and_go, engine, late, prompt
from .test_overlap import loaded

pytestmark = pytest.mark.skipif(
    not hasattr(base, "KVConnectorTransferResults"), reason="models of several groups are not served with this vLLM"
)

KINDS: list[dict[str, Any]] = [
    {},
    {"layers": 4, "windows": (STATE, STATE, STATE, 0)},
    {"layers": 4, "windows": (STATE, 40, 0)},
    {"layers": 2, "windows": (40, 0)},
]


@pytest.fixture(autouse=True)
def as_on_cuda() -> Iterator[None]:
    with patch("stepwell.engines.vllm.opening.zeroed_first", lambda *_: True):
        yield


def test_a_page_is_taken_while_it_is_spilled(tmp_path: Path) -> None:
    with late(None), engine(tmp_path, num_pages=30, runner_v2=True, zeroed_first=True) as h:
        device = h.workers[0].connector._work._copies.device
        h.serve(prompt(200))
        assert device.copied_bytes > 0, "the end of a step waits for what it copies"
        h.forget()
        h.serve(prompt(300, seed=2))
        h.settle()
        h.forget()
        rid = h.add(prompt(200))
        loaded(h, rid)
        assert h.right(h.requests[rid]) and h.requests[rid].external == 192
        h.assert_quiet()


def test_what_was_taken_at_once_is_given_up(tmp_path: Path) -> None:
    """The pages of a request that has ended go to one that begins in the next step: they are zeroes by then."""
    with late(None), engine(tmp_path, num_pages=25, runner_v2=True, zeroed_first=True) as h:
        for seed in (1, 2, 3):
            h.add(prompt(300, seed))
        h.run()
        for seed in (1, 2, 3):
            h.settle()
            h.forget()
            rid = h.add(prompt(300, seed))
            loaded(h, rid)
            assert h.right(h.requests[rid])
        h.assert_quiet()


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_go_in_any_order(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    fields: dict[str, Any] = {
        **KINDS[seed % 4],
        "async_scheduling": dice.random() < 0.5,
        "ranks": 1 + seed % 2,
        "num_pages": dice.choice([122, 258]),
        "batch_tokens": dice.choice([64, 256]),
    }
    common = {"runner_v2": True, "zeroed_first": True, "max_seqs": 6, "max_model_len": 500}
    with late(seed, early=seed < 4), engine(tmp_path, **fields, **common) as h:
        prompts = [prompt(dice.randrange(20, 200), seed=n) for n in range(6)]
        come_and_go(h, prompts, dice, steps=200, at_once=5, answers=100, resets=0.02)
        turns = [h.recall(each) for each in prompts]
        assert all(map(h.right, turns)) and sum(turn.external for turn in turns) > 0
        h.assert_quiet()
