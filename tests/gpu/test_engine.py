"""The small engine over a real well: what it recalls is what it would have computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.bench.gpu.engine.kv import COMPACT, Layout
from lab.rig.well import RealWell, eventually

from .engines import BLOCK, hashing, modelled, prompts, recalled, served_by_recall, whole_blocks

ORDERS = pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])


@ORDERS
def test_what_was_pushed_out_is_recalled_and_right(device: str, well: RealWell, ahead: bool) -> None:
    with hashing(well.home, device, ahead=ahead) as (engine, compute):
        asked = prompts(6)
        first = [engine.serve(prompt, 20) for prompt in asked]
        assert all(recalled(live) == 0 for live in first)
        again = [served_by_recall(engine, prompt, 20) for prompt in asked]
        assert [recalled(live) for live in again] == [whole_blocks(len(prompt)) for prompt in asked]
        assert [live.tokens for live in again] == [live.tokens for live in first]
        assert compute.wrong == 0
        assert engine.pool.free == engine.kv.shape.pages - 1
        eventually(lambda: not well.held(), "nothing is held")


@ORDERS
def test_more_requests_than_pages_wait_are_preempted_and_end_right(device: str, well: RealWell, ahead: bool) -> None:
    with hashing(well.home, device, ahead=ahead, pages=48) as (engine, compute):
        asked = prompts(8, seed=2)
        alone = [engine.serve(prompt, 60).tokens for prompt in asked]
        for seed in range(2):
            engine.pool.forget()
            live = [engine.add(prompt, 60) for prompt in asked]
            dice = random.Random(seed)
            while not all(one.done for one in live):
                engine.step()
                if dice.random() < 0.05:
                    engine.preempt_all()
            engine.run()
            assert [one.tokens for one in live] == alone
        assert compute.wrong == 0
        assert engine.pool.free == engine.kv.shape.pages - 1
        eventually(lambda: not well.held(), "nothing is held")


@ORDERS
def test_requests_that_are_given_up_at_any_moment_leave_nothing(device: str, well: RealWell, ahead: bool) -> None:
    with hashing(well.home, device, ahead=ahead) as (engine, compute):
        prompt = prompts(1, seed=3, least=300)[0]
        engine.serve(prompt, 1)
        for steps in range(12):
            engine.pool.forget()
            live = engine.add(prompt, 8)
            for _ in range(steps):
                engine.step()
            engine.abort(live)
            engine.run()
            assert engine.pool.free == engine.kv.shape.pages - 1
        assert recalled(served_by_recall(engine, prompt, 1)) == whole_blocks(len(prompt))
        assert compute.wrong == 0
        eventually(lambda: not well.held(), "nothing is held")


@ORDERS
@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.value)
def test_a_model_goes_on_from_recalled_kv_as_from_kept_kv(
    device: str, well: RealWell, layout: Layout, ahead: bool
) -> None:
    """Bit for bit: tokens hang on all of the KV, and the recalled pages are compared themselves."""
    with modelled(well.home, device, layout=layout, ahead=ahead) as engine:
        prompt = prompts(1, seed=4, least=9 * BLOCK, most=9 * BLOCK + 1)[0] + [1] * 5  # a hit ends where a recall ends
        engine.serve(prompt, 1)
        kept = engine.serve(prompt, 24)
        assert recalled(kept) == 0
        again = served_by_recall(engine, prompt, 24)
        assert recalled(again) == whole_blocks(len(prompt))
        assert again.tokens == kept.tokens
        assert len(set(again.tokens)) > 3, "tokens that are all alike would show nothing"


def test_a_recall_into_spoilt_pages_is_noticed(device: str, well: RealWell) -> None:
    """That `wrong` counts: a byte in a recalled page is changed behind the engine's back."""
    with hashing(well.home, device) as (engine, compute):
        prompt = prompts(1, seed=5, least=200)[0]
        engine.serve(prompt, 1)
        live = engine.serve(prompt, 4)
        pages = engine.pool.find(live.hashes)
        engine.pool.give_back(pages)
        engine.kv.words[0][pages[0], 0, 0, 0] ^= 1
        engine.serve(prompt, 4)
        assert compute.wrong > 0


def test_a_new_engine_finds_the_last_ones_blocks(device: str, well: RealWell) -> None:
    asked = prompts(3, seed=6)
    with hashing(well.home, device, layout=Layout.LBNHC) as (engine, _):
        for prompt in asked:
            engine.serve(prompt, 4)
        eventually(lambda: not well.held(), "all is filled")
    with hashing(well.home, device, layout=Layout.LBNHC) as (engine, compute):
        again = [served_by_recall(engine, prompt, 4) for prompt in asked]
        assert [recalled(live) for live in again] == [whole_blocks(len(prompt)) for prompt in asked]
        assert compute.wrong == 0


def test_blocks_come_back_from_disk(device: str, folder: Path) -> None:
    (folder / "disk").mkdir(mode=0o700)
    asked = prompts(3, seed=7)
    with (
        RealWell(folder / "home", host="64MiB", disk=f"{folder / 'disk'}:1GiB") as well,
        hashing(well.home, device) as (engine, compute),
    ):
        for prompt in asked:
            engine.serve(prompt, 4)
        eventually(lambda: well.count("disk_blocks") > 0 and well.written(), "all is written")
        well.forget_host()
        engine.pool.forget()
        assert sum(recalled(engine.serve(prompt, 4)) for prompt in asked) > 0
        assert compute.wrong == 0
