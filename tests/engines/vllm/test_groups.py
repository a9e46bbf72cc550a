"""Models with several cache groups: windows beside full attention. Whatever is recalled is what was computed."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.block.digest import Chain
from stepwell.engines.vllm.scheduler import tails
from stepwell.engines.vllm.scheduler.tails import tail_digests

from .build import STATE
from .local import Engine, come_and_go, engine, late, prompt
from .slow import slow_engine

PAGE = 16
KINDS: dict[str, dict[str, Any]] = {
    "one window": {"layers": 2, "windows": (40, 0)},
    "five to one": {"layers": 6, "windows": (33, 33, 33, 33, 33, 0)},
    "uneven": {"layers": 7, "windows": (50, 50, 0)},
    "two spans": {"layers": 3, "windows": (20, 100, 0)},
    "chunks": {"layers": 4, "windows": (64, 64, 64, 0), "chunks": True},
    "other pages": {"layers": 2, "windows": (40, 0), "uneven": True},
    "states": {"layers": 4, "windows": (STATE, STATE, STATE, 0)},
    "states and windows": {"layers": 4, "windows": (STATE, 40, 0)},
    "mostly full": {"layers": 4, "windows": (40, 0, 0, 0)},
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
    pages = fields.pop("pages_a_block", 2 if kind == "other pages" else 1)
    block = fields.get("page", PAGE) * (1 if STATE in fields["windows"] else pages)
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


@pytest.mark.parametrize("kind", ["two spans", "states"])
def test_new_weights_under_live_requests(tmp_path: Path, kind: str) -> None:
    with engine(tmp_path, num_pages=257, max_model_len=400, **KINDS[kind]) as h:
        h.serve(prompt(200))
        running = h.add(prompt(150, seed=2), max_tokens=60)
        h.run_until(lambda: len(h.requests[running].tokens) > 5)
        assert h.update_weights(7)
        h.run()
        again = h.recall(prompt(200), max_tokens=2)
        assert h.right(again) and again.external == 0, "it was computed with other weights"
        assert h.recall(prompt(200), max_tokens=2).external == 192
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


@pytest.mark.parametrize("pages", range(40, 72, 4))
def test_requests_that_are_recalled_together_go_on(tmp_path: Path, pages: int) -> None:
    """Several that wait for their last pages could fill the pool, with nothing that runs and gives any back."""
    fields = {"num_pages": pages, "max_model_len": 160, "max_seqs": 8, "batch_tokens": 16}
    with engine(tmp_path, layers=7, windows=(50, 50, 0), **fields) as h:
        h.serve(prompt(117))
        h.serve(prompt(117, 2))
        h.forget()
        ids = [h.add(prompt(117, 1 + n % 2), max_tokens=2) for n in range(5)]
        h.run(300)
        assert all(h.right(h.requests[rid]) for rid in ids)
        h.assert_quiet()


def test_the_engine_may_have_more_of_it_when_the_tail_is_found(tmp_path: Path) -> None:
    """Another request computes the beginning meanwhile: a part of the window is the engine's own then."""
    longer = [*prompt(200), *prompt(100, seed=2)]
    with engine(tmp_path, num_pages=257, max_model_len=400, **KINDS["two spans"]) as h:
        h.serve(longer)
        h.forget()
        rid, settle, held = h.add(longer, max_tokens=2), h.client.settle, [True]

        def found() -> Any:
            tracked = h.half.live.known.get(rid)
            return tracked.search.ask if tracked is not None and tracked.search is not None else None

        h.client.settle = lambda ask, wait_s: settle(ask, wait_s) and not (held and ask is found())
        h.run_until(lambda: found() is not None)
        other = h.add(prompt(200), kv_transfer_params={"stepwell": {"recall": "never"}})
        h.run_until(lambda: h.requests[other].finish_reason is not None)
        held.clear()
        h.run()
        assert h.right(h.requests[rid])
        assert (h.requests[rid].local, h.requests[rid].external) == (192, 288 - 192)
        assert h.counted("hook_errors") == 0
        h.assert_quiet()


def test_a_shared_beginning_of_a_long_prompt_is_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_PLACES", 30)
    fields = {"num_pages": 257, "max_model_len": 1200, **KINDS["one window"]}
    with engine(tmp_path, **fields) as h:
        recalled = [h.recall([*prompt(320), *prompt(700, seed)]).external for seed in range(2, 6)]
        assert recalled == [0, 0, 320, 320]
        h.assert_quiet()


def busy_pool(h: Engine, steps: int) -> None:
    """Other requests take each page that is free, again and again."""
    for step in range(steps):
        if step % 2 == 0:
            h.add(prompt(60, seed=100 + step), max_tokens=2)
        h.step()


@pytest.mark.parametrize("late_by", [1, 3, 12, 40])
@pytest.mark.parametrize("order", [{}, {"runner_v2": True}, {"async_scheduling": True}], ids=str)
def test_slots_that_are_granted_late_get_no_pages_of_others(
    tmp_path: Path, late_by: int, order: dict[str, Any]
) -> None:
    """The window has moved on meanwhile, and what it has left behind is taken for other tokens."""
    sizes = {"num_pages": 41, "max_model_len": 320, "max_seqs": 3, "batch_tokens": 64}
    with engine(tmp_path, layers=2, windows=(20, 0), **sizes, **order) as h:
        granted, waiting = h.client._granted, []
        h.client._granted = waiting.append
        rid = h.add(prompt(150), max_tokens=100)
        h.run_until(lambda: len(h.requests[rid].tokens) > 0)
        busy_pool(h, late_by)
        for message in waiting:
            granted(message)
        h.client._granted = granted
        h.run()
        assert h.right(h.requests[rid])
        for again in (
            prompt(150),
            [*prompt(150), *h.requests[rid].tokens],
            *(prompt(60, 100 + n) for n in range(0, 40, 2)),
        ):
            assert h.right(h.recall(again, max_tokens=2))
        h.assert_quiet()


@pytest.mark.parametrize("steps", [2, 10, 40])
@pytest.mark.parametrize("kind", [20, STATE])
def test_an_answer_that_comes_late_stores_no_pages_of_others(tmp_path: Path, kind: int, steps: int) -> None:
    """Until it is known what the well has of an engine hit nothing is reserved, and its window moves on; so does its
    state, of which the engine keeps the last ones."""
    sizes = {"num_pages": 61, "max_model_len": 400, "max_seqs": 3, "batch_tokens": 64}
    with engine(tmp_path, layers=2, windows=(kind, 0), **sizes) as h:
        h.serve(prompt(150))
        found, waiting = h.client._found, []
        h.client._found = waiting.append
        rid = h.add(prompt(150), max_tokens=200)
        h.run_until(lambda: len(h.requests[rid].tokens) > 0)
        busy_pool(h, steps)
        for message in waiting:
            found(message)
        h.client._found = found
        h.run()
        assert h.right(h.requests[rid])
        turn = [*h.requests[rid].prompt, *h.requests[rid].tokens]
        for length in range(150, 350, 16):
            assert h.right(h.recall(turn[:length], max_tokens=2))
        h.assert_quiet()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tier_that_is_slow_is_waited_for(tmp_path: Path, hangs: bool) -> None:
    """Of a recall that falls short the engine would keep nothing: what lies in a tier is no stream."""
    fields = {"num_pages": 257, "max_model_len": 600, **KINDS["one window"]}
    with slow_engine(tmp_path, host=128 << 10, block_bytes=2048, **fields) as h:
        h.put_below([prompt(330)])
        h.tier.block_s = 0.003
        rid = h.add(prompt(330), max_tokens=2)
        if hangs:
            h.run_until(lambda: len(h.tier.asked) > 10)
            h.tier.hung = True
        h.run_slowly()
        assert h.right(h.requests[rid])
        assert h.requests[rid].external == (0 if hangs else 320)
        assert h.counted("whole_streams") + h.counted("short_streams") == 0
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


def test_what_other_groups_had_in_a_page_is_not_stored(tmp_path: Path) -> None:
    """A group with fewer layers than the largest uses a part of each page; the rest holds what was there before."""
    with engine(tmp_path, num_pages=129, max_model_len=256, max_seqs=4, **KINDS["uneven"]) as h:
        for seed in range(8):
            h.serve(prompt(200, seed), max_tokens=20)
        payloads = [entry.slots[0][0].payload(entry.slots[0][1]) for entry in h.entries()]
        halves = [payload.reshape(-1, 2, payload.size // 2)[:, 1] for payload in payloads]
        empty = sum(not half.any() for half in halves)
        assert 0 < empty < len(halves), "one group of four has one layer, the others two"
        tails = sum(entry.position < 0 for entry in h.entries())
        assert empty == tails // 3
        assert h.right(h.recall(prompt(200)))


def test_canaries_compare_what_a_group_uses(tmp_path: Path) -> None:
    fields = {"layers": 5, "windows": (0, 50), "max_model_len": 256, "num_pages": 129}
    with engine(tmp_path, extra={"canary": 1, "block_tokens": PAGE}, **fields) as h:
        for seed in range(6):
            h.serve(prompt(200, seed))
        for seed in range(6):
            assert h.right(h.recall(prompt(200, seed), max_tokens=2))
        assert h.counted("canaries") == 6
        assert (h.stat("canaries_clean"), h.stat("canaries_mismatched")) == (6, 0)
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
    if STATE not in fields["windows"] and not fields.get("async_scheduling"):
        fields["drafts"] = dice.choice([0, 3])
    with device, engine(tmp_path, host=dice.choice(["2MiB", "32MiB"]), **fields) as h:
        prompts = [prompt(dice.randrange(20, 300), seed=n) for n in range(5)]
        prompts += [[*prompts[0], *prompt(60, seed=9)]]
        come_and_go(h, prompts, dice, steps=250, at_once=4, answers=60, resets=0.02)
        assert all(h.right(outcome) for outcome in h.finished.values() if outcome.finish_reason == "length")
        turns = [h.recall(each) for each in prompts]
        assert all(map(h.right, turns))
        h.assert_quiet()
