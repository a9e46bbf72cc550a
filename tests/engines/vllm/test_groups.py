"""Models with several cache groups: windows beside full attention. Whatever is recalled is what was computed."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.block.digest import Chain
from stepwell.engines.vllm.scheduler.tails import tail_digests

from .local import engine, late, prompt

PAGE = 16
KINDS: dict[str, dict[str, Any]] = {
    "one window": {"layers": 2, "windows": (40, 0)},
    "five to one": {"layers": 6, "windows": (33, 33, 33, 33, 33, 0)},
    "uneven": {"layers": 7, "windows": (50, 50, 0)},
    "two spans": {"layers": 3, "windows": (20, 100, 0)},
    "chunks": {"layers": 4, "windows": (48, 48, 48, 0), "chunks": True},
    "other pages": {"layers": 2, "windows": (40, 0), "uneven": True},
    "mostly full": {"layers": 5, "windows": (40, 0, 0, 0, 0)},
}
ORDERS: list[dict[str, Any]] = [
    {},
    {"ranks": 2},
    {"runner_v2": True},
    {"async_scheduling": True},
    {"page": 32},
    {"pages_a_block": 4},
]


def fields_of(kind: str, order: dict[str, Any], **more: Any) -> tuple[dict[str, Any], int]:
    """Of `engine`; and tokens of a block. Where pages have other numbers of tokens it has to hold the largest."""
    fields = {**KINDS[kind], **order, **more}
    block = fields.get("page", PAGE) * fields.pop("pages_a_block", 2 if kind == "other pages" else 1)
    return {**fields, "extra": {"block_tokens": block}}, block


def hit_of_engine(folder: Path, first: list[int], then: list[int], answer: int, **fields: Any) -> int:
    """Tokens that the engine's own prefix cache has of a prompt, after another one."""
    with engine(folder, num_pages=513, **fields) as h:
        h.serve(first, max_tokens=answer)
        return h.serve(then).local


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_comes_back_as_the_engine_would_hit_it(tmp_path: Path, kind: str, order: dict[str, Any]) -> None:
    fields, block = fields_of(kind, order, max_seqs=4, max_model_len=512)
    for length in (block, block + 1, 5 * block, 300, 411):
        folder = tmp_path / str(length)
        first = prompt(length)
        with engine(folder, num_pages=513, **fields) as h:
            cold = h.serve(first, max_tokens=5)
            again = h.recall(first, max_tokens=5)
            assert h.right(cold) and h.right(again)
            assert again.external == (length - 1) // block * block
            longer = h.recall([*first, *prompt(50, seed=2)], max_tokens=3)
            assert h.right(longer)
            h.restart_engine()
            assert h.serve(first).external == again.external
            h.assert_quiet()
        if block == PAGE:
            assert again.external >= hit_of_engine(folder / "engine", first, first, 5, **fields)


def test_an_answer_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    with engine(tmp_path, num_pages=401, max_model_len=600, **KINDS["five to one"]) as h:
        turn = h.serve(prompt(200), max_tokens=150)
        for seed in range(3):
            known = [*turn.prompt, *turn.tokens]
            turn = h.recall([*known, *prompt(30, seed)], max_tokens=40)
            assert turn.external == (len(known) - 1) // PAGE * PAGE
            assert h.right(turn)
        h.assert_quiet()


def test_where_prompts_part_the_second_leaves_what_the_third_needs(tmp_path: Path) -> None:
    shared = prompt(320)
    with engine(tmp_path, num_pages=257, max_model_len=600, **KINDS["one window"]) as h:
        recalled = [h.recall([*shared, *prompt(200, seed)]).external for seed in range(2, 6)]
        assert recalled == [0, 0, 320, 320]
        assert h.counted("missed_no_window") == 1
        h.assert_quiet()


def test_windows_are_stored_near_the_places_only_where_requests_may_go_on(tmp_path: Path) -> None:
    """Of six layers five keep a window: a long prompt costs little more than its one layer that keeps all."""
    with engine(
        tmp_path, host="64MiB", num_pages=1025, max_model_len=8192, batch_tokens=512, **KINDS["five to one"]
    ) as h:
        h.serve(prompt(8000), max_tokens=4)
        window = 5 * -(-33 // PAGE)
        assert 500 <= h.stat("blocks") <= 500 + window + 5


def test_preempted_requests_and_chunks_of_any_size(tmp_path: Path) -> None:
    for chunk in (16, 48, 256):
        with engine(
            tmp_path / str(chunk), num_pages=129, max_model_len=256, batch_tokens=chunk, **KINDS["two spans"]
        ) as h:
            ids = [h.add(prompt(200, seed), max_tokens=20) for seed in range(3)]
            for _ in range(12):
                h.step()
            for rid in ids:
                if h.status(rid) == "RUNNING":
                    h.preempt(rid)
            h.run()
            assert all(h.right(h.requests[rid]) for rid in ids)
            for seed in range(3):
                assert h.recall(prompt(200, seed)).external == 192
            h.assert_quiet()


@pytest.mark.parametrize("spoilt", ["prefix", "tail"])
def test_a_load_that_fails_is_computed_whole(tmp_path: Path, spoilt: str) -> None:
    with engine(tmp_path, num_pages=129, max_model_len=256, **KINDS["one window"]) as h:
        h.serve(prompt(200))
        entries = [n for n, entry in enumerate(h.entries()) if (entry.position < 0) == (spoilt == "tail")]
        with h.spoiled(entries[-1]):
            again = h.recall(prompt(200), max_tokens=3)
        assert h.right(again) and again.computed >= 200
        assert h.counted("failed_loads") == 1
        assert h.recall(prompt(200)).external == 192, "it has been computed and stored again"
        h.assert_quiet()


def test_a_part_that_is_missing_ends_the_search_earlier(tmp_path: Path) -> None:
    """The window behind one place lacks a block: the place before it serves, and the prompt's end is stored again."""
    with engine(tmp_path, num_pages=257, max_model_len=400, **KINDS["two spans"]) as h:
        h.serve(prompt(200))
        longer = [*prompt(200), *prompt(100, seed=2)]
        assert h.recall(longer).external == 192
        chain, (tail, _) = Chain(PAGE), h.half._shape.tail
        chain.extend(longer)
        h.client.forget(h.client.session, tail_digests(chain, [(17, tail)]), 0)
        earlier = h.recall(longer)
        assert h.right(earlier) and earlier.external == 192
        assert h.recall(longer).external == 288
        h.assert_quiet()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_come_and_go_in_any_order(tmp_path: Path, kind: str, seed: int) -> None:
    """Preempted, aborted, out of pages, with a small arena: nothing wrong is ever read."""
    dice = random.Random(seed)
    order = ORDERS[dice.randrange(4)]
    device = late(seed, early=seed % 2 == 0) if seed % 3 == 0 else nullcontext()
    sizes = {"max_seqs": 6, "num_pages": 401, "max_model_len": 500, "batch_tokens": dice.choice([48, 128])}
    fields, _ = fields_of(kind, order, **sizes)
    with device, engine(tmp_path, host=dice.choice(["2MiB", "32MiB"]), **fields) as h:
        prompts = [prompt(dice.randrange(20, 300), seed=n) for n in range(5)]
        prompts += [[*prompts[0], *prompt(60, seed=9)]]
        live: list[str] = []
        for _ in range(250):
            live = [rid for rid in live if h.requests[rid].finish_reason is None]
            if len(live) < 4:
                live.append(h.add(dice.choice(prompts), max_tokens=dice.randrange(1, 60)))
            running = [rid for rid in live if h.status(rid) == "RUNNING"]
            if running and dice.random() < 0.05:
                h.preempt(dice.choice(running))
            if dice.random() < 0.03:
                h.abort(dice.choice(live), mid_step=dice.random() < 0.5)
            if dice.random() < 0.02:
                h.reset_prefix_cache()
            h.step()
            if dice.random() < 0.1 and (ended := [r for r in h.finished.values() if r.finish_reason == "length"]):
                turn = dice.choice(ended)
                if len(turn.prompt) < 350:
                    prompts[dice.randrange(len(prompts))] = turn.prompt + turn.tokens
        h.run()
        assert all(h.right(outcome) for outcome in h.finished.values() if outcome.finish_reason == "length")
        turns = [h.recall(each) for each in prompts]
        assert all(map(h.right, turns))
        h.assert_quiet()
