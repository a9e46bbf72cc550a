"""Drafters that keep KV of their own: it is spilled and recalled with the model's, and how far it may be trusted is
what the engine itself trusts of its own hits. Wrong KV of a drafter counts as wrong here, although it costs no more
than drafts."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the engine")

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from stepwell.block.digest import Chain
from stepwell.engines.common import canaries
from stepwell.engines.common.worker_half import WorkerHalf
from stepwell.engines.vllm.scheduler.tails import tail_digests

from .build import drafted_name
from .local import Engine, come_and_go, engine, late, prompt
from .test_canary import verdicts
from .test_groups_seen import decisions

PAGE = 16
AHEAD = ("eagle", "eagle3", "mtp")
"""Drafters that look one token ahead."""
ORDERS: list[dict[str, Any]] = [
    {},
    {"ranks": 2},
    {"async_scheduling": True},
    {"runner_v2": True, "async_scheduling": True},
    {"extra": {"block_tokens": 4 * PAGE}},
    {"prefix_caching": False},
]
WINDOWS: list[dict[str, Any]] = [
    {"layers": 3, "windows": (40, 0)},
    {"layers": 6, "windows": (33, 33, 33, 33, 33, 0)},
    {"layers": 3, "windows": (40, 0), "extra": {"block_tokens": 2 * PAGE}, "dense": True},
]
needs_groups = pytest.mark.skipif(
    not hasattr(base, "KVConnectorTransferResults"), reason="this vLLM serves one group only"
)


def hit_of_engine(folder: Path, tokens: list[int], **fields: Any) -> int:
    with engine(folder, num_pages=513, **fields) as h:
        h.serve(tokens)
        return h.serve(tokens).local


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_a_recall_is_as_long_as_the_engines_own_hit(tmp_path: Path, drafter: str, order: dict[str, Any]) -> None:
    fields = {"drafts": 3, "drafter": drafter, "max_model_len": 512, **order}
    block, again = order.get("extra", {}).get("block_tokens", PAGE), PAGE if drafter in AHEAD else 0
    for length in (PAGE + 1, 4 * PAGE + 1, 101, 300, 411):
        with engine(tmp_path / str(length), num_pages=129, **fields) as h:
            cold, recalled = h.serve(prompt(length), max_tokens=40), h.recall(prompt(length), max_tokens=40)
            assert h.right(cold) and h.right(recalled)
            assert recalled.external == max(0, (length - 1) // block * block - again)
            hit = h.serve(prompt(length), max_tokens=40)
            if block == PAGE and h.setup.prefix_caching:
                assert (hit.local, hit.external) == (recalled.external, 0), "and nothing is added to a hit"
            h.restart_engine()
            assert h.serve(prompt(length)).external == recalled.external
            assert given_up(h) == 0, "what is computed again was not waited for in vain"
            h.assert_quiet()


@needs_groups
@pytest.mark.parametrize("order", WINDOWS, ids=str)
@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_beside_windows_too(tmp_path: Path, drafter: str, order: dict[str, Any]) -> None:
    fields = {"drafts": 3, "drafter": drafter, "max_model_len": 512, **order}
    block, again = order.get("extra", {}).get("block_tokens", PAGE), PAGE if drafter in AHEAD else 0
    for length in (101, 300, 411):
        with engine(tmp_path / str(length), num_pages=513, **fields) as h:
            cold, recalled = h.serve(prompt(length), max_tokens=40), h.recall(prompt(length), max_tokens=40)
            assert h.right(cold) and h.right(recalled)
            assert recalled.external == (length - 1) // block * block - again
            turn = h.recall([*cold.prompt, *cold.tokens, *prompt(30, seed=2)], max_tokens=9)
            assert h.right(turn) and turn.external > recalled.external
            assert given_up(h) == 0
            h.assert_quiet()
        if block == PAGE:
            assert recalled.external >= hit_of_engine(tmp_path / f"engine {length}", prompt(length), **fields)


def given_up(h: Engine) -> int:
    return sum(int(value) for name, value in h.well.stats().items() if name.startswith("gave_up_"))


@needs_groups
@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_what_the_engine_has_itself_is_not_missed(tmp_path: Path, drafter: str) -> None:
    common = prompt(10 * PAGE)
    with engine(tmp_path, num_pages=513, drafts=3, drafter=drafter, max_model_len=512, **WINDOWS[0]) as h:
        h.serve([*common, 1, 2, 3])
        assert h.recall([*common, 1, 2, 3]).external > 0
        again = h.serve([*common, *prompt(100, seed=5)])
        assert again.local == 10 * PAGE - (PAGE if drafter in AHEAD else 0) and again.external == 0
        assert (given_up(h), h.counted("missed_no_window")) == (0, 0)
        h.assert_quiet()


@needs_groups
def test_a_place_lacks_what_lies_before_the_page_that_is_computed_again(tmp_path: Path) -> None:
    with engine(tmp_path, num_pages=513, drafts=3, drafter="eagle", max_model_len=512, **WINDOWS[0]) as h:
        h.serve(prompt(200))
        chain, (part,) = Chain(PAGE), {part.group: part for part in h.half._shape.tail}.values()
        chain.extend(prompt(200))
        h.client.forget(h.client.session, tail_digests(chain, [(8, part)]), 0)
        assert h.recall(prompt(200)).external == 0
        told = decisions(h)[0].no_place
        assert told is not None and told.missing == [("sliding_window of 40", told.places)] and told.places == 11


def drafted(h: Engine, rid: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The drafter's KV of a running request's first tokens, and what it must be."""
    worker, name = h.workers[0], drafted_name(h.setup)
    layer, at = list(worker.kv_caches).index(str(name)), np.arange(tokens)
    table = np.asarray(h.scheduler.kv_cache_manager.get_block_ids(rid)[0])
    return worker.words[layer][table[at // PAGE], :, at % PAGE], h.oracle.rows(
        h.chain(rid).hashes(1, tokens + 1), layer, 0
    )


def test_where_two_prompts_part_a_drafter_sees_the_token_that_is_there(tmp_path: Path) -> None:
    """What it kept of the last token that they have in common is of the token behind it in the first prompt."""
    common = prompt(8 * PAGE)
    with engine(tmp_path, drafts=2, drafter="eagle", extra={"block_tokens": 4 * PAGE}) as h:
        h.serve([*common, 1, 2, 3], max_tokens=20)
        h.forget()
        rid = h.add([*common, 7, 8, 9], max_tokens=30)
        h.run_until(lambda: len(h.requests[rid].tokens) > 5)
        assert h.requests[rid].external == 7 * PAGE
        held, right = drafted(h, rid, len(common) + 3)
        assert (held == right).all()
        h.run()
        h.assert_quiet()


def test_kv_of_the_drafter_that_does_not_come_would_be_noticed(tmp_path: Path) -> None:
    """So the tests here can fail."""
    with engine(tmp_path, drafts=2, drafter="eagle") as h:
        h.serve(prompt(100), max_tokens=20)
        layer, start = list(h.workers[0].kv_caches).index(str(drafted_name(h.setup))), WorkerHalf.start_loads

        def then_lost(half: WorkerHalf, plan: Any) -> None:
            start(half, plan)
            for *_, pages in (block for load in plan.loads for block in load.blocks):
                h.workers[0].words[layer][list(pages)] = 0

        with patch.object(WorkerHalf, "start_loads", then_lost):
            assert h.right(h.recall(prompt(100), max_tokens=20))
        assert {wrong.layer for wrong in h.wrong_kv} == {layer}


@pytest.mark.parametrize("seed", range(10))
def test_requests_that_come_and_go_in_any_order(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    windows: dict[str, Any] = {}
    if seed % 3 == 2 and hasattr(base, "KVConnectorTransferResults"):
        windows = {"layers": 3, "windows": (48, 0)}
    fields: dict[str, Any] = {
        "drafts": dice.randrange(1, 6),
        "drafter": dice.choice(["draft_model", "eagle"]),
        "async_scheduling": seed % 2 == 1,
        "runner_v2": dice.random() < 0.5,
        "num_pages": dice.choice([41, 61]) * (3 if windows else 1),
        "batch_tokens": dice.choice([64, 256]),
    }
    copies = late(seed, early=True) if seed % 3 == 0 else nullcontext()
    more = {"extra": {"block_tokens": dice.choice([PAGE, 2 * PAGE])}, "max_model_len": 500, "max_seqs": 6}
    with copies, engine(tmp_path, **fields, **windows, **more) as h:
        prompts = [prompt(dice.randrange(20, 200), seed=n) for n in range(6)]
        come_and_go(h, prompts, dice, steps=200, at_once=5, answers=100, resets=0.02)
        assert all(h.right(outcome) for outcome in h.finished.values() if outcome.finish_reason == "length")
        turns = [h.recall(each) for each in prompts]
        assert all(map(h.right, turns)) and sum(turn.external for turn in turns) > 0
        h.assert_quiet()


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_a_canary_compares_what_the_model_keeps_alone(tmp_path: Path, drafter: str) -> None:
    """A drafter's KV may be another prompt's; and other weights are noticed all the same."""
    common = prompt(8 * PAGE)
    with engine(tmp_path, drafts=2, drafter=drafter, extra={"canary": 1, "block_tokens": 4 * PAGE}) as h:
        for seed in range(8):
            h.forget()
            assert h.serve([*common, *prompt(20, seed)]).external == 0
        assert verdicts(h) == (7, 0, 0)
        h.oracle.weights += 1
        h.forget()
        h.serve([*common, *prompt(20, 9)])
        assert verdicts(h)[1] == 1


def test_no_canary_where_the_drafters_kv_cannot_be_told_from_the_models(tmp_path: Path) -> None:
    names = "stepwell.engines.vllm.opening.drafted_layers"
    with patch(names, lambda *_: set()), engine(tmp_path, drafts=2, drafter="eagle", extra={"canary": 1}) as h:
        h.serve(prompt(100))
        assert h.recall(prompt(100)).external == 80
        assert h.counted("canaries") == 0


def test_a_canary_is_said_to_cost_what_a_recall_would_have_brought(tmp_path: Path) -> None:
    with engine(tmp_path, drafts=3, drafter="eagle", extra={"canary": 1}) as h:
        h.serve(prompt(200))
        receipt = h.recall(prompt(200)).kv_transfer_params["stepwell"]
        assert receipt["canary_tokens"] == 11 * PAGE


@needs_groups
def test_a_canary_is_never_of_the_drafters_group_alone(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"layers": 3, "windows": (40, 0, 0), "drafts": 3, "drafter": "eagle", "max_model_len": 512}
    with patch.object(canaries, "MAX_BYTES", 1), engine(tmp_path, num_pages=513, extra={"canary": 1}, **fields) as h:
        groups = h.scheduler.kv_cache_config.kv_cache_groups
        assert [str(drafted_name(h.setup))] in [group.layer_names for group in groups]
        for seed in range(10):
            h.serve(prompt(100, seed))
        h.oracle.weights += 1
        for seed in range(2):
            h.recall(prompt(100, seed))
        assert verdicts(h) == (0, 2, 1)
