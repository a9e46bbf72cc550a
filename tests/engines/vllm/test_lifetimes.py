"""Requests that end, are preempted, come back or are aborted at any moment; caches that are reset under them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.engines.paged.cpu import CpuCopies

from .local import Engine, engine, prompt

ORDERS = [{}, {"async_scheduling": True}, {"runner_v2": True}]


class SlowCopy:
    """Every load goes to the copying thread and waits there for `go`."""

    def __init__(self, h: Engine) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        for worker in h.workers:
            copies = worker.connector._work._copies
            copies.scatter = self._slow(copies.scatter)
        self._inline = patch.object(CpuCopies, "inline_bytes", 0)

    def _slow(self, scatter: Any) -> Any:
        def slow(*args: Any) -> Any:
            self.begun.set()
            assert self.go.wait(30)
            return scatter(*args)

        return slow

    def __enter__(self) -> SlowCopy:
        self._inline.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._inline.stop()


def test_one_stores_while_another_loads(tmp_path: Path) -> None:
    """`start_load_kv` comes after the forward: it must not reset what saving needs."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        storing = h.add(prompt(220, seed=2), max_tokens=30)
        h.step()
        loading = h.add(prompt(200))
        h.run()
        assert h.requests[loading].external == 192
        assert h.recall([*prompt(220, seed=2), *h.requests[storing].tokens]).external == 240
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_abort_at_any_step_leaves_nothing(tmp_path: Path, order: dict[str, Any]) -> None:
    with engine(tmp_path, batch_tokens=64, **order) as h:
        h.serve(prompt(200), max_tokens=2)
        for at in range(12):
            for mid_step in (False, True):
                h.forget()
                rid = h.add(prompt(200) + prompt(100, seed=9 + at), max_tokens=20)
                other = h.add(prompt(150, seed=3), max_tokens=5)
                for _ in range(at):
                    h.step()
                h.abort(rid, mid_step=mid_step)
                h.run()
                assert h.requests[rid].finish_reason == "abort"
                assert h.right(h.requests[other])
                h.assert_quiet()


def test_an_id_may_be_used_again(tmp_path: Path) -> None:
    """The step that was under way for the first bearer of an id says nothing of the second."""
    for order in ORDERS[:2]:
        with engine(tmp_path, **order) as h:
            for seed in range(4):
                rid = h.add(prompt(250, seed), max_tokens=50, request_id="again")
                for _ in range(1 + seed):
                    h.step()
                h.abort(rid)
                while h.request(rid) is not None or h._in_flight:  # vLLM itself takes late output for the new one's
                    h.step()
            h.add(prompt(250, 9), max_tokens=20, request_id="again")
            h.run()
            assert h.recall(prompt(250, 9)).external == 240, "the end of the first did not end the second"
            for seed in (0, 1, 2, 3, 9):
                assert h.right(h.recall(prompt(260, seed)[:250], max_tokens=3))
            h.assert_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_abort_before_the_late_copy_ends(tmp_path: Path, ranks: int) -> None:
    """Its pages stay held until the copy is reported, exactly once; then nobody knows it any more."""
    with engine(tmp_path, ranks=ranks) as h:
        h.serve(prompt(200))
        h.forget()
        with SlowCopy(h) as copy:
            rid = h.add(prompt(200))
            h.run_until(copy.begun.is_set)
            h.abort(rid)
            others = [h.add(prompt(300, seed), max_tokens=20) for seed in (5, 6, 7)]
            for _ in range(20):
                h.step()
            assert h.request(rid) is not None, "its pages are being written"
            copy.go.set()
            h.run()
        assert all(h.right(h.requests[o]) for o in others)
        h.assert_quiet()


def test_blocks_freed_under_a_copy(tmp_path: Path) -> None:
    """A slow copy beside forwards, preemptions and freed pages that others poison and take."""
    with engine(tmp_path, num_pages=45, max_seqs=4) as h:
        h.serve(prompt(300), max_tokens=2)
        h.forget()
        with SlowCopy(h) as copy:
            slow = h.add(prompt(300), max_tokens=20)
            h.run_until(copy.begun.is_set)
            busy = [h.add(prompt(100, seed), max_tokens=80) for seed in (2, 3)]
            for _ in range(30):
                h.step()
            h.preempt(next(rid for rid in busy if h.status(rid) == "RUNNING"))
            for _ in range(10):
                h.step()
            copy.go.set()
            h.run()
        assert all(h.right(h.requests[rid]) for rid in (slow, *busy))
        assert h.requests[slow].external == 288
        h.assert_quiet()


def test_a_request_of_one_token_is_spilled(tmp_path: Path) -> None:
    """`request_finished` comes before the report of the only step that it had."""
    with engine(tmp_path) as h:
        h.serve(prompt(160))
        assert h.recall(prompt(170)[:161]).external == 160
        h.assert_quiet()


@pytest.mark.parametrize(
    ("order", "by_reset", "block_pages"),
    [({}, False, 1), ({}, True, 2), (ORDERS[1], False, 1), (ORDERS[2], False, 2), (ORDERS[2], True, 1)],
)
def test_a_preempted_request_resumes_by_recall(
    tmp_path: Path, order: dict[str, Any], by_reset: bool, block_pages: int
) -> None:
    block = 16 * block_pages
    with engine(tmp_path, num_pages=49, max_seqs=2, extra={"block_tokens": block}, **order) as h:
        rid = h.add(prompt(300), max_tokens=60)
        h.run_until(lambda: len(h.requests[rid].tokens) >= 21)  # 320 tokens have KV: the last block is just full
        if by_reset:
            assert h.reset_prefix_cache(preempt=True)
        else:
            h.preempt(rid)
            h.pool.reset_prefix_cache()  # nothing of it is left in the engine's own cache
        h.run()
        outcome = h.requests[rid]
        assert h.right(outcome) and len(outcome.tokens) == 60, "the answer so far survived"
        assert outcome.preemptions == 1
        lost = outcome.computed - (300 + 59)
        assert lost <= (block + 2 if order.get("async_scheduling") else 0)
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_preempted_for_want_of_room(tmp_path: Path, order: dict[str, Any]) -> None:
    """Others take its pages at once; each resume recomputes at most a block, and no token that was made is dropped."""
    with engine(tmp_path, num_pages=41, max_seqs=4, prefix_caching=False, **order) as h:
        assert not h.scheduler.requires_kv_delivery, "else vLLM drops what is under way at each preemption"
        ids = [h.add(prompt(180, seed), max_tokens=200) for seed in range(3)]
        h.run(4000)
        preemptions = sum(h.requests[rid].preemptions for rid in ids)
        assert preemptions >= 2
        for rid in ids:
            assert h.right(h.requests[rid]) and len(h.requests[rid].tokens) == 200
        assert sum(h.requests[rid].computed for rid in ids) <= 3 * (180 + 199) + (18 if order else 16) * preemptions
        h.assert_quiet()


def test_reset_cache_forgets_everything(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        assert h.reset_prefix_cache(connector=True)
        assert h.serve(prompt(200)).external == 0
        assert h.recall(prompt(200)).external == 192, "spilled anew, in the new epoch"
        h.assert_quiet()


@pytest.mark.parametrize("runner_v2", [False, True])
def test_new_weights_under_live_requests(tmp_path: Path, runner_v2: bool) -> None:
    with engine(tmp_path, runner_v2=runner_v2, max_seqs=3) as h:
        h.serve(prompt(200))
        h.forget()
        running = h.add(prompt(200), max_tokens=60)
        h.run_until(lambda: len(h.requests[running].tokens) > 20)
        waiting = h.add(prompt(230, seed=2), max_tokens=5)
        assert h.update_weights(7)
        h.run()
        assert h.recall(prompt(200)).external == 192, "preempted by it, so it spills again"
        assert h.update_weights(8)
        assert h.recall(prompt(200), max_tokens=3).external == 0
        assert h.right(h.requests[running]) and h.right(h.requests[waiting])
        h.assert_quiet()


def test_requests_that_go_on_over_a_reset_spill_nothing_more(tmp_path: Path) -> None:
    """Their KV is of the old weights, whatever happens to them later; that of requests not started is not."""
    with engine(tmp_path, max_seqs=1) as h:
        running = h.add(prompt(100), max_tokens=200)
        waiting = h.add(prompt(150, seed=2), max_tokens=2)
        h.run_until(lambda: len(h.requests[running].tokens) > 20)
        before = h.stat("spilled_blocks")
        assert not h.reset_prefix_cache(connector=True), "pages are in use"
        for _ in range(40):
            h.step()
        h.preempt(running)  # resumes by a hit on its own old pages
        h.run_until(lambda: len(h.requests[running].tokens) == 200)
        assert h.stat("spilled_blocks") == before
        h.run()
        assert h.recall(prompt(150, seed=2)).external == 144
        assert h.requests[waiting].finish_reason == "length"
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_pages_of_a_request_are_free_as_soon_as_it_has_ended(tmp_path: Path, order: dict[str, Any]) -> None:
    """Its last blocks are spilled all the same, by the steps that the engine goes on with for it."""
    with engine(tmp_path, **order) as h:
        rid = h.add(prompt(170))
        h.run_until(lambda: h.requests[rid].finish_reason is not None)
        while h._in_flight:
            h._process(*h._in_flight.popleft())  # what vLLM handed over before it knew
        assert list(h.half.live.lingering) == [rid] and h.busy()
        assert h.request(rid) is None
        assert h.pool.get_num_free_blocks() == h.pool.num_gpu_blocks - 1
        h.run()
        assert h.recall(prompt(170)).external == 160
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_pages_that_are_taken_at_once_are_spilled_before(tmp_path: Path, order: dict[str, Any]) -> None:
    """The pool has room for one request: the next one takes the pages of the one before in the very next step."""
    with engine(tmp_path, num_pages=14, max_seqs=1, batch_tokens=256, **order) as h:
        ids = [h.add(prompt(200, seed)) for seed in range(4)]
        h.run()
        assert h.half.tracked == 0
        for rid, seed in zip(ids, range(4), strict=True):
            assert h.requests[rid].preemptions == 0 and h.requests[rid].external == 0
            assert h.recall(prompt(200, seed)).external == 192
        h.assert_quiet()


def test_pages_that_are_taken_before_their_slots_are_granted_are_given_up(tmp_path: Path) -> None:
    """What the next request computes into them is never taken for the KV of the one before."""
    with engine(tmp_path, num_pages=14, max_seqs=1, batch_tokens=256) as h:
        granted, late = h.client._granted, []
        h.client._granted = late.append
        first = h.add(prompt(200))
        h.run_until(lambda: h.requests[first].finish_reason is not None)
        h.client._granted = granted
        h.add(prompt(200, seed=2))
        h.step()
        assert first not in h.half.live.lingering
        for message in late:
            granted(message)
        h.run()
        assert h.recall(prompt(200)).external == 0
        assert h.recall(prompt(200, seed=2)).external == 192
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS[::2], ids=str)
def test_sleep_and_pause_never_fail_after_a_request_has_ended(tmp_path: Path, order: dict[str, Any]) -> None:
    """An engine in the process of its user makes no step after its last request: its caches are reset right then, as
    `EngineCore._reset_caches` does it. vLLM raises where a page is in use."""
    with engine(tmp_path, **order) as h:
        for seed in range(3):
            rid = h.add(prompt(170, seed))
            h.run_until(lambda rid=rid: h.requests[rid].finish_reason is not None)
            assert h.half.live.lingering
            assert h.reset_prefix_cache(preempt=True, connector=True)
            assert not h.half.live.lingering, "its KV may be of weights that are gone"
        h.run()
        assert [h.recall(prompt(170, seed)).external for seed in range(3)] == [0, 0, 0]
        h.assert_quiet()


def test_a_reset_while_a_load_is_under_way(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        with SlowCopy(h) as copy:
            rid = h.add(prompt(200), max_tokens=40)
            h.run_until(copy.begun.is_set)
            spilled = h.stat("spilled_blocks")
            h.reset_prefix_cache(connector=True)
            copy.go.set()
            h.run()
        assert h.stat("spilled_blocks") == spilled, "what it loaded is of the old epoch"
        assert h.requests[rid].finish_reason == "length"
        assert h.recall(prompt(200)).external == 0
        h.assert_quiet()


def test_a_spill_that_is_granted_late_or_never(tmp_path: Path) -> None:
    """A request that has ended waits for its slots for a bounded time; a lease granted afterwards is given back."""
    with engine(tmp_path) as h:
        now = [0.0]
        h.half.live.clock = lambda: now[0]
        granted, late = h.client._granted, []
        h.client._granted = late.append
        rid = h.add(prompt(100))
        h.run_until(lambda: h.requests[rid].finish_reason is not None)
        for _ in range(5):
            h.step()
        assert list(h.half.live.lingering) == [rid]
        now[0] += 1.0
        h.run()
        assert h.half.tracked == 0 and h.stat("filling") == 6
        for message in late:
            granted(message)
        assert (h.stat("filling"), h.stat("blocks")) == (0, 0)
        h.client._granted = granted
        h.assert_quiet()
        h.recall(prompt(100))
        assert h.recall(prompt(100)).external == 96
