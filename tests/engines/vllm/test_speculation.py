"""Speculative decoding by n-grams: what was drafted and is not the request's is never spilled."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from .local import Engine, come_and_go, engine, late, prompt

PAGE = 16
ORDERS: list[dict[str, Any]] = [{}, {"ranks": 2}, {"runner_v2": True}, {"extra": {"block_tokens": 2 * PAGE}}]


def again(h: Engine, rid: str) -> list[int]:
    """The request's prompt and answer, as the next turn of a conversation has them."""
    return h.requests[rid].prompt + h.requests[rid].tokens


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_what_was_generated_is_recalled_as_it_was_accepted(tmp_path: Path, order: dict[str, Any], drafts: int) -> None:
    """Also where pages are copied beside the engine's steps, and as early as they may be, as on a GPU."""
    early = late(drafts, early=True) if drafts == 3 else nullcontext()
    with early, engine(tmp_path, drafts=drafts, max_seqs=8, num_pages=129, **order) as h:
        block = order.get("extra", {}).get("block_tokens", PAGE)
        ids = [h.add(prompt(40 + n, seed=n), max_tokens=100) for n in range(6)]
        h.run()
        h.settle()
        assert all(h.right(h.requests[rid]) for rid in ids)
        for rid in ids:
            turn = h.recall(again(h, rid))
            assert h.right(turn)
            # The last token is never computed, and steps that end a request confirm no more than they began with.
            assert turn.external >= (len(turn.prompt) - 2 - drafts) // block * block
        h.assert_quiet()


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_go_in_any_order(tmp_path: Path, seed: int) -> None:
    """Preempted, aborted, out of pages, with drafts of which any number is right: all that is recalled is right."""
    dice = random.Random(seed)
    with engine(tmp_path, drafts=dice.randrange(1, 6), max_seqs=6, num_pages=41, batch_tokens=64) as h:
        prompts = [prompt(dice.randrange(20, 200), seed=n) for n in range(6)]
        come_and_go(h, prompts, dice, steps=300, at_once=5, answers=120)
        assert all(h.right(outcome) for outcome in h.finished.values() if outcome.finish_reason == "length")
        turns = [h.recall(each) for each in prompts]
        assert all(map(h.right, turns)) and sum(turn.external for turn in turns) > 0
        h.assert_quiet()
