"""Copies that run beside the forward, as on a GPU: the device does nothing that nobody waits for, and pages are
poisoned as soon as the engine has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from .local import engine, late, prompt

ORDERS: list[dict[str, Any]] = [{}, {"async_scheduling": True}, {"runner_v2": True}]


@pytest.mark.parametrize("num_pages", [25, 30], ids=["at_once", "while_it_runs"])
@pytest.mark.parametrize("order", ORDERS, ids=["cpu", "async", "v2"])
def test_pages_that_are_taken_while_they_are_spilled(tmp_path: Path, order: dict[str, Any], num_pages: int) -> None:
    with late(None), engine(tmp_path, num_pages=num_pages, **order) as h:
        device = h.workers[0].connector._work._copies.device
        h.serve(prompt(200))
        assert device.copied_bytes == 0, "handed over, and not done yet"
        h.forget()
        h.serve(prompt(300, seed=2))
        assert device.copied_bytes > 0, "its pages were wanted"
        h.settle()
        h.forget()
        rid = h.add(prompt(200), max_tokens=3)
        loaded(h, rid)
        assert h.right(h.requests[rid]) and h.requests[rid].external == 192
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_pages_that_are_taken_from_a_request_that_is_preempted(tmp_path: Path, order: dict[str, Any]) -> None:
    with late(None), engine(tmp_path, num_pages=33, max_seqs=2, **order) as h:
        rid = h.add(prompt(300), max_tokens=60)
        h.run_until(lambda: len(h.requests[rid].tokens) >= 21)
        h.preempt(rid)
        h.pool.reset_prefix_cache()
        other = h.add(prompt(200, seed=2), max_tokens=2)
        loaded(h, rid, other)
        assert h.right(h.requests[rid]) and h.right(h.requests[other])
        assert len(h.requests[rid].tokens) == 60 and h.requests[rid].preemptions == 1
        h.assert_quiet()


def test_a_recall_into_pages_that_are_still_spilled(tmp_path: Path) -> None:
    with late(None), engine(tmp_path, num_pages=25) as h:
        h.serve(prompt(300))
        h.settle()
        h.forget()
        h.serve(prompt(300, seed=2))
        h.forget()
        rid = h.add(prompt(300), max_tokens=2)
        loaded(h, rid)
        assert h.right(h.requests[rid]) and h.requests[rid].external == 288
        h.forget()
        again = h.add(prompt(300, seed=2), max_tokens=2)
        loaded(h, again)
        assert h.right(h.requests[again]) and h.requests[again].external == 288
        h.assert_quiet()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_hit_on_pages_that_the_same_step_computes(tmp_path: Path, order: dict[str, Any]) -> None:
    """They are not to be spilled beside that step, but after it."""
    with late(None, early=True), engine(tmp_path, **order) as h:
        first = h.add(prompt(200))
        h.half.drop(first)  # goes on without stepwell, so that the other one spills what it computes
        other = h.serve([*prompt(200), *prompt(20, seed=3)])
        h.settle()
        assert other.local == 192 and h.stat("spilled_blocks") == 13
        h.forget()
        again = h.add(prompt(200), max_tokens=3)
        loaded(h, again)
        assert h.right(h.requests[again]) and h.requests[again].external == 192
        h.assert_quiet()


def test_pages_stay_held_while_they_are_loaded(tmp_path: Path) -> None:
    with late(None), engine(tmp_path) as h:
        h.serve(prompt(200))
        h.settle()
        h.forget()
        rid = h.add(prompt(200), max_tokens=3)
        h.run_until(lambda: h.status(rid) == "WAITING_FOR_REMOTE_KVS")
        h.step()
        h.abort(rid)
        for _ in range(20):
            h.step()
        assert h.request(rid) is not None, "its pages are being written"
        h.settle()
        h.run()
        assert h.request(rid) is None
        h.assert_quiet()


@pytest.mark.parametrize("how", ["refused", "broken"])
def test_a_device_that_fails_costs_recalls_and_nothing_else(tmp_path: Path, how: str) -> None:
    with late(5) as devices, engine(tmp_path) as h:
        h.serve(prompt(200))
        h.settle()
        devices[0].refuses, devices[0].broken = (0, False) if how == "refused" else (None, True)
        h.forget()
        seen = h.serve(prompt(200), max_tokens=3)
        assert h.right(seen) and seen.computed == 200 + 2
        other = h.serve(prompt(100, seed=2))
        h.settle()
        assert h.right(other) and h.stat("filling") == 0, "what could not be spilled is nobody's"
        devices[0].refuses, devices[0].broken = None, False
        h.settle()
        assert h.right(h.recall(prompt(200)))
        h.assert_quiet()


def test_a_large_recall_is_handed_over_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time: what others wait for is bounded."""
    monkeypatch.setattr("stepwell.engines.common.loads.PART_BYTES", 1)
    with late(None), engine(tmp_path) as h:
        h.serve(prompt(200))
        h.settle()
        h.forget()
        rid = h.add(prompt(200), max_tokens=3)
        h.run_until(lambda: h.status(rid) == "WAITING_FOR_REMOTE_KVS")
        copies = h.workers[0].connector._work._copies
        for _ in range(3):
            h.step()
        assert len(copies._touching(range(h.setup.num_pages))) == 2
        loaded(h, rid)
        assert h.right(h.requests[rid]) and h.requests[rid].external == 192
        h.assert_quiet()


def test_a_canary_is_compared_beside_the_forward(tmp_path: Path) -> None:
    with late(7), engine(tmp_path, extra={"canary": 1}) as h:
        h.serve(prompt(200))
        h.settle()
        assert h.right(h.recall(prompt(200)))
        for _ in range(10):
            h.step()
        h.settle()
        h.run()
        assert (h.stat("canaries_clean"), h.stat("canaries_mismatched")) == (1, 0)


def test_a_canary_has_read_its_pages_before_they_are_written_anew(tmp_path: Path) -> None:
    """All of its blocks."""
    with late(None), engine(tmp_path, num_pages=25, extra={"canary": 1}) as h:
        h.serve(prompt(200))
        h.settle()
        h.forget()
        h.serve(prompt(200))
        assert len(h.half._canaries._open) == 1, "it is being compared"
        h.forget()
        h.serve(prompt(300, seed=2))
        for _ in range(5):
            h.settle()
            h.step()
        assert (h.stat("canaries_clean"), h.stat("canaries_mismatched")) == (1, 0)


def loaded(h: Any, *rids: str) -> None:
    """Runs until these have ended; copies end when nothing else is left to do."""
    for _ in range(200):
        if all(h.requests[rid].finish_reason is not None for rid in rids):
            break
        for _ in range(5):
            h.step()
        h.settle()
    h.settle()
    h.run()
